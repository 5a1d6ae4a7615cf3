"""Shadow weights that a fused optimizer writes in its steps: nothing is cast any more, and every bit is as it would be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import halfpeak
from casting.test_opcasts_cache import (
    MUTATIONS,
    Twice,
    by_data,
    by_fused_optimizer,
    by_new_parameter,
    by_numpy,
    by_storage,
    by_swap,
    reference,
)
from halfpeak.casting.opcasts import OpCasts
from halfpeak.casting.shadows import ShadowWeights
from halfpeak.fused import FusedAdagrad, FusedAdam, FusedAdamW, FusedLAMB, FusedNovoGrad, FusedSGD

Make = Callable[[Any], Optimizer]

FUSED: dict[str, Make] = {
    "adamw": lambda p: FusedAdamW(p, lr=0.01),
    "compact": lambda p: FusedAdam(p, lr=0.01, master="remainder8", moments="int8"),
    "sgd": lambda p: FusedSGD(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: FusedAdagrad(p, lr=0.01),
    "lamb": lambda p: FusedLAMB(p, lr=0.01),
    "novograd": lambda p: FusedNovoGrad(p, lr=0.01),
}


class CountCasts(TorchDispatchMode):
    """Counts the casts of float32 tensors of the given shapes to a low dtype."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.shapes = {weight.shape for weight in weights}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].shape in self.shapes:
            self.count += args[0].dtype is torch.float32 and (kwargs or {}).get("dtype") is not torch.float32
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """Shapes of weights are unlike those of activations. A norm wants its weight in float32; one layer is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.LayerNorm(5)
        self.seldom = nn.Linear(5, 5, bias=False)
        self.last = nn.Linear(5, 7)

    def forward(self, x: Tensor, *, seldom: bool = False) -> Tensor:
        hidden = self.norm(F.relu(self.conv(x)).flatten(2).sum(2))
        return self.last(self.seldom(hidden) if seldom else hidden)

    def cast_weights(self) -> list[Tensor]:
        return [*self.conv.parameters(), *self.last.parameters()]


class Run:
    """A run of ``Net`` whose batches depend on the number of the step alone.

    With ``anew`` shadows are cast from the weights after every step, as without an optimizer that writes them.
    """

    def __init__(self, make: Make = FUSED["adamw"], *, anew: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = make(self.net.parameters())
        asked: dict[str, Any] = {"level": "O4", "shadow_weights": True, **options}
        self.engine = halfpeak.prepare(self.net, self.optimizer, **asked)
        self.anew = anew
        self.steps = 0

    def step(self, *, overflow: bool = False, seldom: bool = False) -> int:
        """Train one step; how many weights were cast in it."""
        generator = torch.Generator().manual_seed(self.steps)
        self.steps += 1
        with CountCasts(self.net.cast_weights()) as casts:
            for _ in range(self.engine.plan.accumulation.every):
                x = torch.randn(2, 3, 4, 4, generator=generator)
                with self.engine.forward():
                    out = self.net(x, seldom=seldom)
                    loss = F.cross_entropy(out, torch.tensor([1, 3])) * (float("inf") if overflow else 1.0)
                self.engine.backward(loss)
                self.engine.step()
        if self.anew:
            self.shadows().clear()
        return casts.count

    def shadows(self) -> ShadowWeights:
        assert isinstance(self.engine.casting, OpCasts)
        assert self.engine.casting.shadows is not None
        return self.engine.casting.shadows


def assert_same(left: nn.Module, right: nn.Module) -> None:
    for (name, one), other in zip(left.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_no_weight_is_cast_after_the_first_step_and_every_bit_is_the_same(make: Make, every: int) -> None:
    options: dict[str, Any] = {"accumulate": every, "clip": 0.5}
    anew, written = Run(make, anew=True, **options), Run(make, **options)
    assert [written.step() for _ in range(4)] == [4, 0, 0, 0]
    # Once for the forward passes and once for what the step will write.
    assert [anew.step() for _ in range(4)] == [4, 4, 4, 4]
    assert_same(anew.net, written.net)


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_skipped_step_leaves_them_right(level: str, first: bool) -> None:
    options: dict[str, Any] = {
        "level": level,
        "loss_scale": "dynamic",
        "scale": halfpeak.ScaleConfig(init=64.0),
    }
    plain, shadowed = Run(anew=True, **options), Run(**options)
    pattern = [first, False, not first, False, False]
    for overflow in pattern:
        plain.step(overflow=overflow)
        shadowed.step(overflow=overflow)
        for weight in shadowed.net.cast_weights():
            shadow = shadowed.shadows().of(weight)
            assert shadow is not None
            if shadow.is_current():
                assert shadow.copy is not None
                assert torch.equal(shadow.copy, weight.to(shadow.copy.dtype))
    assert int(shadowed.engine.skipped) == 1
    assert shadowed.step() == 0
    plain.step()
    assert_same(plain.net, shadowed.net)


def test_what_no_operation_asks_for_low_has_no_shadow() -> None:
    run = Run()
    run.step()
    assert run.shadows().of(run.net.norm.weight) is None
    assert run.shadows().of(run.net.seldom.weight) is None
    before = run.engine.memory().shadow
    assert run.step(seldom=True) == 0
    assert run.engine.memory().shadow > before
    plain = Run(anew=True)
    plain.step()
    plain.step(seldom=True)
    for seldom in (False, True, True, False):
        run.step(seldom=seldom)
        plain.step(seldom=seldom)
    assert_same(plain.net, run.net)


def test_channels_last() -> None:
    runs = [Run(anew=True), Run()]
    for run in runs:
        run.step()
        run.net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    casts = [[run.step() for _ in range(3)] for run in runs]
    # Only the convolution lies elsewhere now.
    assert casts == [[4, 4, 4], [1, 0, 0]]
    assert_same(runs[0].net, runs[1].net)
    shadow = runs[1].shadows().of(runs[1].net.conv.weight)
    assert shadow is not None
    assert shadow.copy is not None
    assert shadow.copy.is_contiguous(memory_format=torch.channels_last)


def test_freezing_and_unfreezing() -> None:
    runs = [Run(anew=True), Run()]
    for run in runs:
        counts: list[int] = []
        for trains in (True, False, False, True, True):
            run.net.conv.requires_grad_(trains)
            counts.append(run.step())
        # What the optimizer does not move is cast once per step.
        assert counts == ([4] * 5 if run.anew else [4, 2, 2, 2, 0])
    assert_same(runs[0].net, runs[1].net)


SILENT = {by_data, by_fused_optimizer, by_numpy, by_storage}
"""Writes that change neither version nor address."""

SEEN = [mutation for mutation in MUTATIONS if mutation not in {*SILENT, by_new_parameter}]


@pytest.mark.parametrize("mutate", SEEN, ids=lambda mutate: mutate.__name__)
@pytest.mark.parametrize("when", ["before the forward pass", "before the step"])
def test_what_somebody_writes_is_noticed(mutate: Callable[[Twice], None], when: str) -> None:
    results: list[nn.Module] = []
    for anew in (True, False):
        torch.manual_seed(0)
        model, x = Twice(), torch.rand(2, 4)
        optimizer = FusedAdamW(model.parameters(), lr=0.1)
        engine = halfpeak.prepare(model, optimizer, "O4", shadow_weights=True)
        assert isinstance(engine.casting, OpCasts)
        for step in range(5):
            if step == 2 and when == "before the forward pass":
                mutate(model)
            with engine.forward():
                loss = model(x).float().square().sum()
            engine.backward(loss)
            if step == 2 and when == "before the step" and mutate is not by_swap:
                mutate(model)
            engine.step()
            if anew:
                engine.casting.clear_cache()
        results.append(model)
    assert_same(*results)


@pytest.mark.parametrize("mutate", [by_data, by_numpy], ids=lambda mutate: mutate.__name__)
def test_clearing_helps_where_nothing_can_be_noticed(mutate: Callable[[Twice], None]) -> None:
    model, x = Twice(), torch.rand(2, 4)
    engine = halfpeak.prepare(model, FusedAdamW(model.parameters(), lr=0.1), "O4", shadow_weights=True)
    assert isinstance(engine.casting, OpCasts)
    for _ in range(3):
        with engine.forward():
            loss = model(x).float().square().sum()
        engine.backward(loss)
        engine.step()
        mutate(model)
        engine.casting.clear_cache()
        with engine.forward():
            assert torch.equal(model(x), reference(model, x, torch.bfloat16))


def test_a_graph_kept_past_the_step_says_so_as_in_float32() -> None:
    run = Run()
    run.step()
    with run.engine.forward():
        kept = run.net(torch.randn(2, 3, 4, 4)).float().sum()
    run.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_evaluation_between_steps_uses_them_and_keeps_training_right() -> None:
    plain, shadowed = Run(anew=True), Run()
    x = torch.randn(2, 3, 4, 4)
    for _ in range(3):
        outs: list[Tensor] = []
        for run in (plain, shadowed):
            run.step()
            for context in (torch.no_grad, torch.inference_mode):
                with context(), run.engine.forward(), CountCasts(run.net.cast_weights()) as casts:
                    outs.append(run.net(x))
                assert run is plain or casts.count == 0
        assert all(torch.equal(out, outs[0]) for out in outs)
    assert_same(plain.net, shadowed.net)


def test_memory_state_and_removal() -> None:
    run = Run()
    names = set(run.engine.state_dict()["models"][0]) if "models" in run.engine.state_dict() else None
    for _ in range(2):
        run.step()
    count = sum(weight.numel() for weight in run.net.cast_weights())
    assert 2 * count <= run.engine.memory().shadow <= 2 * count + 2 * 16 * 5
    assert set(run.net.state_dict()) == {name for name, _ in run.net.named_parameters()}
    if names is not None:
        assert set(run.engine.state_dict()["models"][0]) == names
    low = {torch.bfloat16, torch.float16}
    kept = [value for row in run.optimizer.state_dict()["state"].values() for value in row.values()]
    assert not any(isinstance(value, Tensor) and value.dtype in low for value in kept)
    run.engine.remove()
    assert len(run.shadows()) == 0
    for parameter in run.net.parameters():
        parameter.grad = torch.ones_like(parameter)
    run.optimizer.step()
    assert len(run.shadows()) == 0


def test_a_loaded_state_is_what_the_next_step_starts_from() -> None:
    plain, shadowed = Run(anew=True), Run()
    for run in (plain, shadowed):
        run.step()
        state = copy.deepcopy(run.engine.state_dict())
        run.step()
        run.engine.load_state_dict(state)
        run.step()
        run.step()
    assert_same(plain.net, shadowed.net)


def test_a_copied_engine_writes_shadows_of_its_own_weights() -> None:
    run = Run()
    run.step()
    run.step()
    other = copy.copy(run)
    other.engine = copy.deepcopy(run.engine)
    model = other.engine.model
    assert isinstance(model, Net)
    other.net = model
    assert [run.step() for _ in range(3)] == [0, 0, 0]
    assert [other.step() for _ in range(3)] == [4, 0, 0]
    assert_same(run.net, other.net)


@pytest.mark.parametrize("second", [FUSED["sgd"], partial(torch.optim.AdamW, lr=0.01, fused=True)])
def test_two_optimizers_write_each_their_own(second: Make) -> None:
    results: list[nn.Module] = []
    for anew in (True, False):
        torch.manual_seed(0)
        first_net, second_net = nn.Linear(3, 5), nn.Linear(5, 7)
        optimizers = [FUSED["adamw"](first_net.parameters()), second(second_net.parameters())]
        engine = halfpeak.prepare([first_net, second_net], optimizers, "O4", shadow_weights=True)
        assert isinstance(engine.casting, OpCasts)
        counts: list[int] = []
        for step in range(6):
            with CountCasts([first_net.weight, second_net.weight]) as casts:
                with engine.forward():
                    loss = second_net(first_net(torch.full((2, 3), 0.1 * step))).float().square().sum()
                engine.backward(loss)
                for optimizer in optimizers:
                    engine.step(optimizers=optimizer)
            if anew:
                engine.casting.clear_cache()
            counts.append(casts.count)
        if not anew:
            assert counts[3:] == ([0] * 3 if second is FUSED["sgd"] else [1] * 3)
        results.append(nn.ModuleList([first_net, second_net]))
    assert_same(*results)


def test_parameters_that_share_memory_have_shadows_cast_from_it() -> None:
    results: list[nn.Module] = []
    for anew in (True, False):
        torch.manual_seed(0)
        first, second, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.rand(2, 4)
        second.weight.data = first.weight.data
        model = nn.Sequential(first, second)
        engine = halfpeak.prepare(model, FUSED["sgd"](model.parameters()), "O4", shadow_weights=True)
        assert isinstance(engine.casting, OpCasts)
        for _ in range(4):
            with engine.forward():
                loss = model(x).float().square().sum()
            engine.backward(loss)
            engine.step()
            if anew:
                engine.casting.clear_cache()
        results.append(model)
    assert_same(*results)


def test_an_interrupted_step_leaves_none_that_is_taken_for_right(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(lambda p: FusedAdamW(p, lr=0.01, road="eager"))
    run.step()
    weight, x = run.net.last.weight, torch.randn(2, 3, 4, 4)
    with run.engine.forward():
        loss = run.net(x).float().sum()
    run.engine.backward(loss)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("halfpeak.fused.roads.eager.EagerRoad.update", stop)
    with pytest.raises(KeyboardInterrupt):
        run.engine.step()
    shadow = run.shadows().of(weight)
    assert shadow is not None
    assert not shadow.is_current()
