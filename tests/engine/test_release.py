"""Gradients that are released while backward goes on: training is what it is without, to the bit, whatever happens.

Every run has a twin whose gradients are taken in when backward is over.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import halfpeak
from halfpeak import Engine, OrderError
from halfpeak.core.errors import ConfigError
from halfpeak.engine.slots import Phase
from halfpeak.fused import FusedAdamW, FusedSGD
from halfpeak.ops import chunks
from laws.test_waits import Waits
from reliability.support import LEVELS, state_hash

INF, NAN = float("inf"), float("nan")
WIDE = 512
"""A square matrix of this width is a bucket by itself."""

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: FusedAdamW(p, lr=0.01, eps=1e-4, road="eager"),
    "AdamW, remainders": lambda p: FusedAdamW(p, lr=0.01, eps=1e-4, road="eager", master="remainder"),
    "SGD": lambda p: FusedSGD(p, lr=0.05, momentum=0.9, road="eager"),
}


class Net(nn.Module):
    """Three buckets that backward completes one after another, one of small parameters, and some that not every pass uses."""

    def __init__(self, *, uses_side: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDE)
        self.middle = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(WIDE)
        self.last = nn.Linear(WIDE, 2)
        self.side = nn.Linear(WIDE, WIDE, bias=False)
        self.uses_side = uses_side

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for layer in self.middle:
            x = torch.relu(layer(x))
        if self.uses_side:
            x = x + self.side(x)
        return self.last(self.norm(x))


def build(
    level: str, optimizer: str = "AdamW", *, release: bool, model: nn.Module | None = None, **options: Any
) -> Engine:
    torch.manual_seed(0)
    model = Net() if model is None else copy.deepcopy(model)
    options = {"accumulate": 3, "scale": halfpeak.ScaleConfig(init=256.0), **options}
    return halfpeak.prepare(
        model, OPTIMIZERS[optimizer](model.parameters()), level, release_gradients=release, **options
    )


def both(level: str, optimizer: str = "AdamW", **options: Any) -> tuple[Engine, Engine]:
    return build(level, optimizer, release=True, **options), build(level, optimizer, release=False, **options)


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def loss_of(engine: Engine, step: int, factor: float = 1.0) -> Tensor:
    with engine.forward():
        return engine.model(batch(step)).float().square().mean() * factor


def train(engine: Engine, steps: range, factors: dict[int, float] | None = None) -> None:
    for step in steps:
        engine.backward(loss_of(engine, step, (factors or {}).get(step, 1.0)))
        engine.step()


def assert_same(released: Engine, plain: Engine) -> None:
    assert state_hash(released) == state_hash(plain)
    assert int(released.taken) + int(released.skipped) > 0


def low_gradients(engine: Engine) -> int:
    return sum(p.grad is not None for p in engine.model.parameters())


class Watch:
    """How many large parameters have a gradient when backward gets to the first layer."""

    def __init__(self, engine: Engine) -> None:
        self._large = [p for p in engine.model.parameters() if p.numel() == WIDE * WIDE]
        self.seen: list[int] = []
        first = engine.model.first
        assert isinstance(first, nn.Linear)
        self._handle = first.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda _: self.seen.append(sum(p.grad is not None for p in self._large)))


@pytest.mark.parametrize(("level", "expected"), [("O2", 0), ("O3", 0), ("O5", 0)])
def test_gradients_are_gone_before_backward_is_over(level: str, expected: int) -> None:
    released, plain = both(level)
    watches = Watch(released), Watch(plain)
    for engine in (released, plain):
        engine.backward(loss_of(engine, 0))
        engine.step()
        engine.backward(loss_of(engine, 1))
    assert watches[0].seen == [expected, expected]
    assert watches[1].seen == [3, 3]


OVERFLOWS: dict[str, dict[int, float]] = {
    "none": {},
    "first of a window": {0: INF},
    "middle": {4: NAN},
    "last": {2: INF, 5: INF},
}
CLIPS: dict[str, Any] = {"none": None, "norm": 0.5, "value": halfpeak.ClipValue(value=0.01)}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(("accumulate", "overflows"), [*((3, name) for name in OVERFLOWS), (1, "last")])
def test_a_run_is_the_run_without_release_to_the_bit(
    level: str, clip: str, accumulate: int, overflows: str
) -> None:
    released, plain = both(level, "SGD", clip=CLIPS[clip], accumulate=accumulate)
    for engine in (released, plain):
        train(engine, range(6), OVERFLOWS[overflows])
    assert_same(released, plain)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scale", [1.0, 512.0, 0.3, "dynamic"])
def test_optimizers_and_scales(optimizer: str, scale: float | str) -> None:
    released, plain = both("O5", optimizer, loss_scale=scale, scale=None, clip=1.0)
    for engine in (released, plain):
        train(engine, range(6), {4: INF} if scale == "dynamic" else {})
    assert_same(released, plain)


def test_a_window_that_its_end_cuts_short() -> None:
    released, plain = both("O2", accumulate=halfpeak.Accumulation(every=3, total=5))
    for engine in (released, plain):
        train(engine, range(5))
    assert_same(released, plain)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_several_losses_before_a_step(level: str) -> None:
    released, plain = both(level, accumulate=1, num_losses=2, clip=1.0)
    for engine in (released, plain):
        for step in range(3):
            engine.backward(loss_of(engine, 2 * step), loss_id=0)
            engine.backward(loss_of(engine, 2 * step + 1, INF if step == 1 else 1.0), loss_id=1)
            engine.step()
    assert_same(released, plain)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_parameters_come_go_and_freeze(level: str) -> None:
    released, plain = both(level, clip=1.0)
    for engine in (released, plain):
        train(engine, range(3))
        engine.model.uses_side = True  # type: ignore[assignment]
        train(engine, range(3, 4))
        engine.model.middle[0].weight.requires_grad_(False)  # type: ignore[index,union-attr]
        train(engine, range(4, 7))
        engine.model.middle[0].weight.requires_grad_(True)  # type: ignore[index,union-attr]
        engine.model.uses_side = False  # type: ignore[assignment]
        train(engine, range(7, 9))
        extra = nn.Parameter(torch.ones(2))
        engine.optimizers[0].add_param_group({"params": [extra]})
        train(engine, range(9, 12))
    assert_same(released, plain)


def test_tied_weights_are_summed_before_they_are_taken() -> None:
    def tied() -> nn.Module:
        model = Net()
        model.middle[2].weight = model.middle[0].weight
        return model

    torch.manual_seed(1)
    released, plain = both("O2", model=tied())
    for engine in (released, plain):
        train(engine, range(6))
    assert_same(released, plain)


class Strange(nn.Module):
    """Weights that do not lie in the order of their elements, and single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(2, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(WIDE, WIDE).t())
        self.factor = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.ones(0))

    def forward(self, x: Tensor) -> Tensor:
        maps = self.inner(x.repeat(1, 16).view(-1, 2, 8, 8))
        return (maps.flatten(1)[:, :8] @ self.turned[:8]) * self.factor + self.nothing.sum()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_layouts(level: str) -> None:
    torch.manual_seed(1)
    released, plain = both(level, model=Strange())
    for engine in (released, plain):
        train(engine, range(6))
    assert_same(released, plain)


def test_the_window_can_be_saved_and_loaded_in_its_middle_and_by_an_engine_without_release() -> None:
    uninterrupted = build("O2", release=False)
    train(uninterrupted, range(9))
    for saves, loads in ((True, False), (False, True), (True, True)):
        first = build("O2", release=saves)
        train(first, range(5))
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second = build("O2", release=loads)
        second.load_state_dict(torch.load(file, weights_only=True))
        train(second, range(5, 9))
        assert_same(second, uninterrupted)


def test_a_copy_has_hooks_of_its_own() -> None:
    engine, plain = both("O2")
    for one in (engine, plain):
        train(one, range(4))
    copied, expected = copy.deepcopy(engine), copy.deepcopy(plain)
    watch = Watch(copied)
    for one in (copied, expected):
        train(one, range(4, 6))
    assert_same(copied, expected)
    assert watch.seen == [0, 0]
    assert state_hash(engine) == state_hash(plain)


def test_two_engines_know_nothing_of_each_other() -> None:
    released, plain = both("O2")
    other = build("O5", release=True)
    for step in range(6):
        for engine in (released, other, plain):
            train(engine, range(step, step + 1))
    assert_same(released, plain)
    assert_same(other, trained("O5", range(6)))


def trained(level: str, steps: range) -> Engine:
    engine = build(level, release=False)
    train(engine, steps)
    return engine


class Stop(Exception):
    pass


def raising(engine: Engine, step: int) -> None:
    """A backward pass that fails in its middle, when some buckets are complete."""
    first = engine.model.first
    assert isinstance(first, nn.Linear)

    def stop(_: Tensor) -> None:
        raise Stop

    handle = first.register_forward_hook(lambda module, args, output: output.register_hook(stop) and None)
    loss = loss_of(engine, step)
    handle.remove()
    with pytest.raises(Stop):
        engine.backward(loss)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_first_backward_pass_that_fails_has_not_happened(level: str) -> None:
    released, plain = both(level)
    for engine in (released, plain):
        train(engine, range(3))
        raising(engine, 100)
        assert engine.lanes[0].phase is Phase.CLEAN
        assert low_gradients(engine) == 0
        assert not engine.lanes[0].targets()
        train(engine, range(3, 6))
    assert_same(released, plain)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_later_one_that_fails_drops_the_window(level: str) -> None:
    released = build(level, release=True)
    train(released, range(4))
    raising(released, 100)
    assert released.lanes[0].phase is Phase.CLEAN
    assert low_gradients(released) == 0
    assert released.index == 3
    train(released, range(3, 6))
    assert_same(released, trained(level, range(6)))


def test_a_later_one_that_fails_before_anything_was_added_has_not_happened() -> None:
    released, plain = both("O2")
    for engine in (released, plain):
        train(engine, range(4))
        with pytest.raises(Stop), engine.scaled(torch.ones(()), lanes=engine.lanes):
            raise Stop
        train(engine, range(4, 6))
    assert_same(released, plain)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_gradients_that_are_functions_wait_for_the_end(level: str) -> None:
    released, plain = both(level, accumulate=2)
    for engine in (released, plain):
        for step in range(4):
            engine.backward(loss_of(engine, step), create_graph=step % 2 == 1)
            if step % 2:
                penalty = sum(g.square().sum() for g in engine.lanes[0].targets() if g.requires_grad)
                assert isinstance(penalty, Tensor)
                assert torch.isfinite(penalty)
            engine.step()
    assert_same(released, plain)


def test_inputs_and_retained_graphs() -> None:
    released, plain = both("O2", accumulate=1)
    for engine in (released, plain):
        for step in range(3):
            loss = loss_of(engine, step)
            some = [engine.model.middle[0].weight, engine.model.last.bias]  # type: ignore[index,union-attr]
            engine.backward(loss, inputs=some, retain_graph=True)
            engine.backward(loss)
            engine.step()
    assert_same(released, plain)


def test_checkpointed_activations() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            for layer in self.middle:
                x = checkpoint(lambda y, layer=layer: torch.relu(layer(y)), x, use_reentrant=False)  # type: ignore[assignment]
            return self.last(self.norm(x))

    torch.manual_seed(0)
    released, plain = both("O2", model=Checkpointed())
    for engine in (released, plain):
        train(engine, range(6))
    assert_same(released, plain)


class Shared(Net):
    """One weight in several re-entrant checkpoints, each of which is a backward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for _ in range(3):
            x = checkpoint(lambda y: torch.relu(self.middle[0](y)), x, use_reentrant=True)  # type: ignore[assignment]
        return self.last(self.norm(x))


def test_what_comes_to_a_weight_later_in_the_same_backward_pass_is_added() -> None:
    torch.manual_seed(0)
    released, plain = both("O2", model=Shared(), loss_scale=256.0, scale=None)
    for engine in (released, plain):
        engine.backward(loss_of(engine, 0))
    pairs = list(zip(released.lanes[0].targets(), plain.lanes[0].targets(), strict=True))
    assert pairs
    for mine, theirs in pairs:
        # Summed in float32 here, in float16 there.
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-4 * float(theirs.abs().max()))


def test_two_backward_passes_in_one_block() -> None:
    released, plain = both("O5", loss_scale=1.0, scale=None)
    for engine in (released, plain):
        losses = loss_of(engine, 0), loss_of(engine, 1)
        with engine.scaled(losses[0], lanes=engine.lanes) as scaled:
            scaled.backward()
            losses[1].backward()
    for mine, theirs in zip(released.lanes[0].targets(), plain.lanes[0].targets(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))


def test_kept_and_unscaled_gradients() -> None:
    released, plain = both("O2", clip=1.0)
    for engine in (released, plain):
        train(engine, range(2))
        engine.backward(loss_of(engine, 2))
        assert float(engine.unscale()) == 0.0
    grads = [[g.clone() for g in engine.lanes[0].targets()] for engine in (released, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    for engine in (released, plain):
        engine.step(keep_gradients=True)
    norms = [[p.grad for p in engine.model.parameters()] for engine in (released, plain)]
    assert [g is None for g in norms[0]] == [g is None for g in norms[1]]
    assert all(torch.equal(a, b) for a, b in zip(*norms, strict=True) if a is not None and b is not None)
    assert_same(released, plain)


def test_zero_grad_and_abort_drop_the_window() -> None:
    released, plain = both("O2")
    for engine in (released, plain):
        train(engine, range(4))
        engine.optimizers[0].zero_grad()
        engine.abort()
        assert engine.index == 3
        train(engine, range(3, 6))
    assert_same(released, plain)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_nothing_waits_for_a_device_in_backward(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a device, where a scalar cannot be read for nothing.
    monkeypatch.setattr(chunks, "is_on_host", lambda *_: False)
    engine = build(level, release=True)
    train(engine, range(3))
    for step in range(3, 6):
        loss = loss_of(engine, step, INF if step == 4 else 1.0)
        with Waits() as waits:
            engine.backward(loss)
        assert waits.count == 0
        engine.step()


def test_memory_is_that_of_the_sums() -> None:
    engine = build("O5", release=True)
    train(engine, range(1))
    now = engine.memory().per_parameter()
    ends = [slot.target for slot in engine.lanes[0].slots()]
    used = sum(end.numel() for end in ends if end.grad is not None)
    assert used > 3 * WIDE * WIDE
    assert now["gradients"] == pytest.approx(4 * used / engine.memory().parameters, rel=1e-3)


def test_sparse_gradients_are_refused_as_without() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(8, 4, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.words(x.long().abs() % 8)

    errors: list[str] = []
    for release in (True, False):
        engine = build("O0", release=release, model=Words(), accumulate=1)
        engine.backward(loss_of(engine, 0))
        with pytest.raises(halfpeak.HalfpeakError) as caught:
            engine.step()
        errors.append(f"{type(caught.value)} {caught.value}")
    assert errors[0] == errors[1]


def test_hooks_do_nothing_outside_of_the_engine() -> None:
    engine = build("O2", release=True)
    train(engine, range(3))
    loss_of(engine, 3).backward()
    assert low_gradients(engine) == len(list(engine.model.parameters())) - 1
    engine.step()
    engine.step()
    with pytest.raises(OrderError, match="did not go through halfpeak"):
        engine.step()


def test_remove_takes_the_hooks_off_and_nothing_keeps_the_engine() -> None:
    engine = build("O2", release=True)
    train(engine, range(4))
    model = engine.model

    def hooked() -> int:
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())  # type: ignore[attr-defined]

    assert hooked() > 0
    engine.remove()
    assert hooked() == 0

    engine = build("O2", release=True)
    train(engine, range(4))
    model, gone = engine.model, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    model(batch(0).to(torch.float16)).float().sum().backward()
    assert all(p.grad is not None for p in model.middle.parameters())  # type: ignore[union-attr]


def test_gradients_that_others_write_afterwards_are_refused() -> None:
    """As ``DistributedDataParallel`` does at the end of a backward pass."""
    engine = build("O2", release=True)
    train(engine, range(4))
    weight = engine.model.middle[0].weight  # type: ignore[index,union-attr]

    def backward_and_write() -> None:
        with engine.scaled(loss_of(engine, 4), lanes=engine.lanes) as scaled:
            scaled.backward()
            weight.grad = torch.zeros_like(weight)

    with pytest.raises(OrderError, match="after release_gradients=True had taken them"):
        backward_and_write()
    assert engine.index == 3
    train(engine, range(3, 6))
    assert_same(engine, trained("O2", range(6)))


class Reducing(nn.Module):
    """What a parallel wrapper looks like from outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def no_sync(self) -> None:
        """Leave gradients local."""


def test_a_parallel_wrapper_is_refused() -> None:
    engine = build("O2", release=True)
    with (
        pytest.raises(ConfigError, match="before Reducing has averaged"),
        engine.forward(Reducing(engine.model)),
    ):
        pass
    train(engine, range(3))
    assert_same(engine, trained("O2", range(3)))
    model = Reducing(Net())
    with pytest.raises(ConfigError, match="before Reducing has averaged"):
        halfpeak.prepare(model, FusedAdamW(model.parameters()), "O0", release_gradients=True)


def test_what_cannot_be_released_is_refused_before_anything_changes() -> None:
    model = Net()
    parameters = list(model.parameters())
    dtypes = [p.dtype for p in parameters]
    cases: list[tuple[Any, Any, str]] = [
        (torch.optim.AdamW(parameters), True, "one optimizer of halfpeak.fused, not AdamW; write FusedAdamW"),
        ([FusedAdamW(parameters[:2]), FusedSGD(parameters[2:], lr=0.1)], True, "not FusedAdamW, FusedSGD"),
        ([], True, "not none"),
        (FusedAdamW(parameters), "yes", "release_gradients='yes' must be True or False"),
    ]
    for optimizers, release, message in cases:
        with pytest.raises(ConfigError, match=message):
            halfpeak.prepare(model, optimizers, "O2", release_gradients=release)
        assert [p.dtype for p in model.parameters()] == dtypes
        assert not any(p._post_accumulate_grad_hooks for p in parameters)  # type: ignore[attr-defined]


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build("O2", release=True)
    monkeypatch.setattr("halfpeak.engine.release.is_multi_rank", lambda: True)
    with pytest.raises(ConfigError, match="before several ranks have averaged"):
        engine.backward(loss_of(engine, 0))
    assert low_gradients(engine) == 0
    with pytest.raises(ConfigError, match="before several ranks have averaged"):
        build("O2", release=True)
