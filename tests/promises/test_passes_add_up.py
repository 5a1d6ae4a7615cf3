"""Promise 3: passes add up; the step, or ``zero_grad()`` on either side, ends the window; what raises leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfpeak
from halfpeak.core.errors import ClosureError, OrderError
from halfpeak.core.optimizer_state import params_of
from promises.by_hand import SIDES, ByHand, Loop, Prepared, Side
from promises.cases import (
    Case,
    adam,
    batch,
    critic,
    fused_adamw,
    fused_sgd,
    generator,
    loss_of,
    rows,
    run,
    sgd,
    torchs_fused,
    train,
    two_layers,
)
from support.nets import LEVELS, MASTERED
from support.states import same

OPTIMIZERS = {"Adam": adam, "torch's fused": torchs_fused, "FusedAdamW": fused_adamw, "FusedSGD": fused_sgd}
WINDOW: dict[str, Any] = {"every": 3}


def steps(loop: Loop) -> Iterator[None]:
    for seed in range(9):
        train(loop, seed)
        yield


# Windows that are dropped.


def dropped(loop: Loop, side: Side, set_to_none: bool) -> Iterator[None]:
    """Bad batches are dropped before a window, and inside it, where the passes are counted on."""
    for seed in range(9):
        if seed % 3 != 1:
            loop.backward(loss_of(loop, 50 + seed))
            loop.unscale()
            loop.zero_grad(side, set_to_none)
        train(loop, seed)
        yield


def aborted(loop: Loop) -> Iterator[None]:
    """Like ``zero_grad()``, and the passes of the window are counted anew."""
    for seed in range(11):
        train(loop, seed)
        if seed in (1, 6):
            if isinstance(loop, ByHand):
                loop.passes -= loop.passes % loop.every
                loop.zero_grad("optimizer")
            else:
                loop.engine.abort()
                assert not loop.engine.is_open
        yield


# Parameters that come, go and freeze inside a window.


def group_added(loop: Loop, when: str) -> Iterator[None]:
    for seed in range(6):
        if seed == 1 and when == "without gradients":
            loop.zero_grad("model")
        if seed == 1 and when != "before the step":
            loop.add_group(1)
            if isinstance(loop, Prepared):  # what is only looked at changes nothing
                loop.engine.state_dict(), loop.engine.loop_state_dict()
                loop.engine.memory(), loop.engine.main_params(), loop.engine.unscale()
        with loop.forward():
            loss = loop.output(loop.output(batch(seed), 0).tanh(), 1).square().mean()
        loop.backward(loss)
        yield
        if seed == 1 and when == "before the step":
            loop.add_group(1)
        loop.step()
        yield


def of_the_first(nets: list[nn.Module]) -> Optimizer:
    return torch.optim.SGD(nets[0].parameters(), lr=0.125)


def fused_of_the_first(nets: list[nn.Module]) -> Optimizer:
    return fused_sgd(nets[:1])


def frozen_inside(loop: Loop, side: Side) -> Iterator[None]:
    """The gradient that it has still belongs to the step."""
    for seed in range(9):
        train(loop, seed)
        loop.freeze(side, 0, seed % 3 == 2)
        yield


# Closures.


def closures(loop: Loop) -> Iterator[None]:
    for seed in range(4):

        def closure(seed: int = seed) -> Tensor:
            loss = loss_of(loop, seed)
            loop.backward(loss)
            return loss

        loop.step_with(closure)
        yield


class SamWithClosure(torch.optim.SGD):
    """Perturbs the weights by the gradients of one call of the closure, and steps by those of a second."""

    def __init__(self, nets: list[nn.Module]) -> None:
        super().__init__(nets[0].parameters(), lr=0.25)

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        added = [(p, p.grad * 0.5) for p in params_of(self) if p.grad is not None]
        with torch.no_grad():
            for p, value in added:
                p.add_(value)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for p, value in added:
                p.sub_(value)
        super().step()
        return loss


CLOSURES: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": sgd,
    "torch's fused": torchs_fused,
    "FusedSGD": fused_sgd,
    "LBFGS": lambda nets: torch.optim.LBFGS(nets[0].parameters(), lr=0.25, max_iter=4),
    "SAM": SamWithClosure,
}

# What raises.


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ZeroDivisionError


def raise_error(*_: object) -> None:
    raise ZeroDivisionError


def in_forward(loop: Loop) -> None:
    handle = loop.nets[0][2].register_forward_hook(raise_error)  # type: ignore[index,union-attr,operator]
    try:
        loop.backward(loss_of(loop, 50))
    finally:
        handle.remove()


def in_backward(loop: Loop) -> None:
    """After the gradients of the last layer were computed."""
    net: Any = loop.nets[0]
    handle = net[1].register_forward_hook(lambda module, args, output: Raise.apply(output))
    try:
        loop.backward(loss_of(loop, 50))
    finally:
        handle.remove()


def in_a_hook(loop: Loop) -> None:
    handle = loop.tensors("model")[0].register_post_accumulate_grad_hook(raise_error)
    try:
        loop.backward(loss_of(loop, 50))
    finally:
        handle.remove()


def in_the_body(loop: Loop) -> None:
    if isinstance(loop, Prepared):
        with loop.engine.scaled(loss_of(loop, 50)) as scaled:
            scaled.backward()
            raise ZeroDivisionError
    raise ZeroDivisionError


RAISES = (in_forward, in_backward, in_a_hook, in_the_body)


def raised(loop: Loop, act: Callable[[Loop], None]) -> Iterator[None]:
    """Before the first pass of a window, and before its second. Gradients are as before it, to the bit and by identity."""
    for seed in range(9):
        if seed % 3 != 2:
            before = [tensor.grad for tensor in loop.holders("model")]
            if isinstance(loop, Prepared):
                with pytest.raises(ZeroDivisionError):
                    act(loop)
                assert all(
                    tensor.grad is old for tensor, old in zip(loop.holders("model"), before, strict=True)
                )
            yield
        train(loop, seed)
        yield


def raised_through_another(g: Loop, d: Loop) -> Iterator[None]:
    for seed in range(4):
        for bad in (True, False):
            with g.forward(), d.forward():
                fake = g.output(batch(seed))
                loss = d.output(Raise.apply(fake) if bad else fake).square().mean()
            with (
                pytest.raises(ZeroDivisionError)
                if bad and isinstance(g, Prepared)
                else suppress(ZeroDivisionError)
            ):
                if isinstance(g, Prepared) or not bad:
                    g.backward(loss)
            yield
        g.step()
        d.step()
        yield


CASES: dict[str, Case] = {
    **{f"windows, {name}": Case(steps, makes=makes, options=WINDOW) for name, makes in OPTIMIZERS.items()},
    **{
        f"{side}.zero_grad({none}), {every}": Case(
            partial(dropped, side=side, set_to_none=none), options={"every": every}
        )
        for side in SIDES
        for none in (True, False)
        for every in (1, 3)
    },
    **{
        f"{side}.zero_grad({none}), FusedSGD": Case(
            partial(dropped, side=side, set_to_none=none), makes=fused_sgd
        )
        for side in SIDES
        for none in (True, False)
    },
    "aborted": Case(aborted, options=WINDOW),
    "aborted, FusedAdamW": Case(aborted, makes=fused_adamw),
    **{
        f"a group added {when}, {every}, {makes.__name__}": Case(
            partial(group_added, when=when), (lambda: generator() + critic(),), makes, {"every": every}
        )
        for makes in (of_the_first, fused_of_the_first)
        for when, lengths in (
            ("with gradients", (1, 3)),
            ("without gradients", (1, 3)),
            ("before the step", (1, 2)),
        )
        for every in lengths
    },
    **{
        f"frozen inside on the {side}'s side": Case(
            partial(frozen_inside, side=side), makes=sgd, options=WINDOW
        )
        for side in SIDES
    },
    **{f"a closure of {name}": Case(closures, makes=makes) for name, makes in CLOSURES.items()},
    **{
        f"raised {act.__name__}, {name}": Case(
            partial(raised, act=act), makes=makes, options={"every": every}
        )
        for act in RAISES
        for name, makes, every in (("Adam", adam, 3), ("FusedSGD", fused_sgd, 1))
    },
    "raised through another engine's network": Case(raised_through_another, (generator, critic), sgd),
}


@rows(CASES)
def test_passes(case: Case, level: str) -> None:
    run(case, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("total", [None, 8, 7, 6, 1])
def test_a_window_ends_with_its_last_pass_and_with_the_run(level: str, total: int | None) -> None:
    (net,) = two_layers()
    every = halfpeak.Accumulation(every=3, total=total)
    engine = halfpeak.prepare(
        net, adam([net]), halfpeak.LEVELS[level].replace(loss_scale=64.0), accumulate=every
    )
    count, found = total or 6, list[tuple[bool, bool]]()
    for seed in range(count):
        with engine.forward():
            loss = net(batch(seed)).float().square().mean()
        engine.backward(loss)
        result = engine.step()
        found.append((result.boundary, result.stepped()))
        assert engine.is_open is not result.boundary
    assert found == [((i + 1) % 3 == 0 or i + 1 == total,) * 2 for i in range(count)]
    assert engine.micro_step == count


class Raises(torch.optim.SGD):
    """Raises in a step when it is told to: before it moves anything, half way, or afterwards."""

    at = ""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.at == "before":
            raise ZeroDivisionError
        if self.at == "half way":
            params_of(self)[0].add_(1)
            raise ZeroDivisionError
        super().step(closure)
        if self.at == "after":
            raise ZeroDivisionError


def raising(nets: list[nn.Module]) -> list[Optimizer]:
    """Two optimizers, of which the second may raise after the first has moved."""
    return [Raises(net.parameters(), lr=0.125, momentum=0.5) for net in nets]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("at", ["before", "half way", "after"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_step_that_raises_leaves_counters_and_scales_and_drops_the_window(
    level: str, at: str, every: int
) -> None:
    nets = generator() + critic()
    scale = halfpeak.ScaleConfig(init=64.0, interval=2)
    engine = halfpeak.prepare(nets, raising(nets), level, scale=scale, accumulate=every)

    def passes(seed: int) -> None:
        for number in range(every):
            with engine.forward():
                loss = nets[1](nets[0](batch(seed + number)).float().tanh()).float().square().mean()
            engine.backward(loss)
            if number + 1 < every:
                engine.step()

    passes(0)
    engine.step()
    before = (int(engine.num_steps), int(engine.num_skipped), engine.scalers[0].state_dict())
    engine.optimizers[1].at = at  # type: ignore[attr-defined]
    passes(2)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert (int(engine.num_steps), int(engine.num_skipped), engine.scalers[0].state_dict()) == before
    assert engine.micro_step == every
    assert not engine.is_open
    assert all(p.grad is None for net in nets for p in (*net.parameters(), *engine.main_params()))
    # What the optimizers have moved, the model has, too.
    for weight, main in engine.pairs:
        assert torch.equal(main.to(weight.dtype), weight)
    engine.optimizers[1].at = ""  # type: ignore[attr-defined]
    passes(4)
    assert engine.step().stepped()
    assert int(engine.num_steps) == 2


@pytest.mark.parametrize("level", LEVELS)
def test_a_closure_is_not_called_after_a_pass_that_overflowed(level: str) -> None:
    def train_with(loop: Prepared, factors: dict[int, float]) -> tuple[list[bool], list[int]]:
        taken, called = list[bool](), list[int]()
        for seed, factor in factors.items():
            loop.backward(loss_of(loop, seed) * factor)

            def closure(seed: int = seed) -> Tensor:
                called.append(seed)
                loss = loss_of(loop, seed)
                loop.backward(loss)
                return loss

            taken.append(loop.engine.step(closure).stepped())
        return taken, called

    loop, calm = (Prepared(level, two_layers(), sgd) for _ in range(2))
    assert train_with(loop, {0: 1.0, 1: math.inf, 2: 1.0}) == ([True, False, True], [0, 2])
    assert (int(loop.engine.num_steps), int(loop.engine.num_skipped)) == (2, 1)
    train_with(calm, {0: 1.0, 2: 1.0})
    assert same(loop.values(), calm.values())


@pytest.mark.parametrize("level", MASTERED)
def test_a_closure_past_the_engine_is_refused(level: str) -> None:
    loop = Prepared(level, two_layers(), sgd)

    def closure() -> Tensor:
        loss = loss_of(loop)
        loss.backward()
        return loss

    before = loop.values()
    with pytest.raises(ClosureError, match=r"engine\.backward\(loss\), inside the closure"):
        loop.engine.step(closure)
    assert same(loop.values(), before)
    assert train(loop)


# A pass inside another, or a step inside a pass, is refused; the pass has then not begun.


def nested_pass(loop: Prepared) -> None:
    with loop.engine.scaled(loss_of(loop)) as scaled:
        loop.backward(loss_of(loop, 1))
        scaled.backward()


def step_in_a_hook(loop: Prepared) -> None:
    """As optimizers do that step in the backward pass to save memory."""
    handle = loop.tensors("model")[3].register_post_accumulate_grad_hook(lambda _: loop.optimizers[0].step())
    try:
        loop.backward(loss_of(loop))
    finally:
        handle.remove()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("act", [nested_pass, step_in_a_hook])
def test_what_must_not_happen_inside_a_pass_is_refused(level: str, act: Callable[[Prepared], None]) -> None:
    loop, calm = (Prepared(level, two_layers(), adam, every=2) for _ in range(2))
    for one in (loop, calm):
        train(one)
    with pytest.raises(OrderError, match=r"inside another one|not in a hook of a parameter"):
        act(loop)
    for one in (loop, calm):
        for seed in range(1, 4):
            train(one, seed)
    assert same(loop.values(), calm.values())
