"""Fused optimizers in an engine: shared memory, states, refused steps. What a pass leaves them is in tests/promises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

import halfpeak
from halfpeak.core.optimizer_state import params_of
from halfpeak.fused import FusedAdamW, FusedLAMB, FusedSGD
from halfpeak.optim import ApexOptimWrapper, OptimWrapper
from reliability.support import batch, net
from support.nets import make_batch, make_net
from support.snapshot import values
from support.states import same

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: FusedAdamW(p, lr=1e-3, eps=1e-4),
    "SGD": lambda p: FusedSGD(p, lr=0.05, momentum=0.9, dampening=0.3),
    "LAMB": lambda p: FusedLAMB(p, lr=1e-2, max_grad_norm=0.0),
}
OVERFLOWS = (0, 3)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = make_batch(step)
    return mse_loss(model(x).float(), y) * (float("inf") if step in OVERFLOWS else 1.0)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_state_loaded_before_a_cast_keeps_what_float32_knew(kind: str) -> None:
    """The model is float32 when the wrapper's checkpoint is loaded, and O3 then makes it float16."""

    def make() -> tuple[nn.Module, OptimWrapper]:
        model = make_net()
        return model, ApexOptimWrapper(optimizer=KINDS[kind](model.parameters()), opt_level="O3")

    def train_on(model: nn.Module, wrapper: OptimWrapper, steps: range) -> None:
        for step in steps:
            with wrapper.optim_context(model):
                loss = loss_of(model, step)
            wrapper.update_params(loss)

    model, wrapper = make()
    train_on(model, wrapper, range(1, 3))
    state = copy.deepcopy((model.state_dict(), wrapper.state_dict()))
    other, resumed = make()
    other.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    train_on(model, wrapper, range(4, 6))
    train_on(other, resumed, range(4, 6))
    assert values(model, wrapper.optimizer) == values(other, resumed.optimizer)


# Weights whose memory other objects share.


class Odd(nn.Module):
    """Parameters that are tied, transposed, with gaps, of no dimension, without elements, or channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.number = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0))
        self.gaps = nn.Parameter(torch.randn(4, 12)[:, ::2])
        self.unused = nn.Parameter(torch.randn(3))
        self.convolution = nn.Conv2d(1, 3, 3).to(memory_format=torch.channels_last)
        self.tied = self.turned

    def forward(self, x: Tensor) -> Tensor:
        low = x.to(self.turned.dtype)
        squares = low @ self.turned @ self.tied.t() * self.number + low @ (self.gaps @ self.gaps.t())
        return squares + self.nothing.sum() + self.convolution(low.view(1, 1, -1, 4)).mean()


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_parameters(level: str, kind: str) -> None:
    seen: list[list[Tensor]] = []
    for clip in (None, lambda grads: None):
        torch.manual_seed(0)
        model = Odd()
        scale = halfpeak.ScaleConfig(init=128.0)
        engine = halfpeak.prepare(model, KINDS[kind](model.parameters()), level, clip=clip, scale=scale)
        for step in range(5):
            with engine.forward():
                loss = model(batch(step)).float().abs().mean() / 100
            engine.backward(loss)
            assert engine.step().stepped()
        assert model.tied is model.turned
        assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
        seen.append([p.detach() for p in model.parameters()])
    assert all(a.isfinite().all() for a in seen[0])
    assert same(*seen)


@pytest.mark.parametrize("parts", [[slice(4)], [slice(1, 3)], [slice(1, 2), slice(3, 4)]])
def test_parameters_that_share_memory_go_on_sharing_it(parts: list[slice]) -> None:
    def make() -> list[nn.Parameter]:
        weight = torch.linspace(-1, 1, 16).view(4, 4)
        return [nn.Parameter(value) for value in (weight, torch.ones(4), *(weight[part] for part in parts))]

    pairs = [make(), make()]
    optimizers = [
        FusedAdamW(pairs[0], lr=0.1, backend="eager"),
        torch.optim.AdamW(pairs[1], lr=0.1, foreach=False),
    ]
    for _ in range(3):
        for parameters, optimizer in zip(pairs, optimizers, strict=True):
            (parameters[0].square().sum() + sum(p.sum() for p in parameters[1:])).backward()
            optimizer.step()
            optimizer.zero_grad()
    first, _, *others = pairs[0]
    assert same([first[part] for part in parts], others)
    torch.testing.assert_close(pairs[0], pairs[1], rtol=1e-6, atol=1e-6)


def evaluation_copy(model: nn.Module) -> Callable[[], list[Tensor]]:
    twin = copy.deepcopy(model)
    # Not by ``state_dict()``, which gives float32 copies at O2.
    for ours, theirs in zip(model.modules(), twin.modules(), strict=True):
        for name, parameter in ours.named_parameters(recurse=False):
            setattr(theirs, name, nn.Parameter(parameter.detach()))
    held: list[Tensor] = list(twin.parameters())
    return lambda: held


def arrays(model: nn.Module) -> Callable[[], list[Tensor]]:
    views = [
        (p.detach().view(torch.int16) if p.dtype is torch.bfloat16 else p.detach()).numpy()
        for p in model.parameters()
    ]
    dtypes = [p.dtype for p in model.parameters()]
    return lambda: [torch.from_numpy(view).view(dtype) for view, dtype in zip(views, dtypes, strict=True)]


def shared_run(
    level: str, share: Callable[[nn.Module], Callable[[], list[Tensor]]] | None, when: int
) -> tuple[list[Tensor], set[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    engine = halfpeak.prepare(
        model,
        FusedAdamW(model.parameters(), lr=0.01, backend="eager"),
        halfpeak.LEVELS[level].replace(loss_scale=64.0),
        clip=0.5,
    )
    seen: Callable[[], list[Tensor]] = list
    for step in range(5):
        if step == when and share is not None:
            seen = share(model)
        if step == 3:
            # Loading a state makes new flat buffers.
            engine.optimizers[0].load_state_dict(engine.optimizers[0].state_dict())
        with engine.forward():
            loss = model(torch.linspace(-1, 1, 28).view(4, 7) * step).float().square().sum()
        engine.backward(loss)
        assert engine.step().stepped()
        for there, own in zip(seen(), model.parameters(), strict=share is not None and step >= when):
            assert torch.equal(there, own[: len(there)])
    masters = [p for group in engine.optimizers[0].param_groups for p in group["params"]]
    memory = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *masters]}
    return [p.detach().clone() for p in [*model.parameters(), *masters]], memory


@pytest.mark.filterwarnings("ignore:a copy of a prepared model")
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.parametrize("share", [evaluation_copy, arrays])
@pytest.mark.parametrize("when", [0, 2])
def test_whoever_else_holds_the_memory_of_weights_goes_on_seeing_them(
    level: str, share: Callable[[nn.Module], Callable[[], list[Tensor]]], when: int
) -> None:
    alone, memory = shared_run(level, None, 0)
    shared, _ = shared_run(level, share, when)
    assert same(alone, shared)
    # References within halfpeak do not count as sharing: unshared weights of one pair of dtypes lie in one buffer.
    assert len(memory) == (1 if level == "O0" else 3)


@pytest.mark.parametrize("which", ["masters", "weights"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_or_weights_that_get_other_memory_go_on_being_stepped(level: str, which: str) -> None:
    seen: list[list[Tensor]] = []
    for moves in (False, True):
        model = make_net()
        engine = halfpeak.prepare(
            model, KINDS["AdamW"](model.parameters()), halfpeak.LEVELS[level].replace(loss_scale=64.0)
        )
        lows = [p for p in model.parameters() if p.dtype is not torch.float32]
        masters = [engine.pairs.main_of(p) for p in lows]
        for step in range(1, 3):
            if moves and step == 2:
                for parameter in masters if which == "masters" else lows:
                    parameter.data = parameter.data.clone()
            with engine.forward():
                loss = loss_of(model, step)
            engine.backward(loss)
            assert engine.step().stepped()
        seen.append([*lows, *masters])
    assert same(*seen)


@pytest.mark.parametrize(("level", "which"), [("O0", "weights"), ("O5", "weights"), ("O5", "masters")])
def test_weights_in_shared_memory_stay_there(level: str, which: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = halfpeak.prepare(model, FusedAdamW(model.parameters()), level)
    shared = [*model.parameters()] if which == "weights" else params_of(engine.optimizers[0])
    for parameter in shared:
        parameter.data.share_memory_()
    places = [p.data_ptr() for p in shared]
    with engine.forward():
        loss = model(torch.ones(1, 4)).float().sum()
    engine.backward(loss)
    assert engine.step().stepped()
    assert [p.data_ptr() for p in shared] == places
    assert all(p.is_shared() for p in shared)


# A step that is not taken.


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_learning_rate_counts_no_step(kind: str) -> None:
    seen: list[list[Any]] = []
    for is_tried in (False, True):
        model = net()
        scale = halfpeak.ScaleConfig(init=1024.0)
        engine = halfpeak.prepare(model, KINDS[kind](model.parameters()), "O2", scale=scale)
        group = engine.optimizers[0].param_groups[0]
        known = group["lr"]
        for lr in (known, torch.ones(2), known):
            if lr is known or is_tried:
                group["lr"] = lr
                with engine.forward():
                    loss = model(batch(0)).float().square().mean()
                engine.backward(loss)
                with (
                    nullcontext()
                    if lr is known
                    else pytest.raises((RuntimeError, ValueError), match="element")
                ):
                    engine.step()
        seen.append(values(model, engine.optimizers[0]))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizers_state_is_that_of_a_run_whose_first_step_was_never_tried(kind: str) -> None:
    """A skipped first step leaves no state that a file or a copy could mistake for a step."""
    model = make_net()
    engine = halfpeak.prepare(model, KINDS[kind](model.parameters()), "O2")
    with engine.forward():
        loss = loss_of(model, 0)
    engine.backward(loss)
    assert not engine.step().stepped()
    assert engine.optimizers[0].state_dict()["state"] == {}
