"""Promise 4: an optimizer that would step a gradient that is not finite does not move, nor does anything with it.

``tests/laws`` overflows every parameter, in every pass of a window, with every front end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import halfpeak
from halfpeak import Engine
from halfpeak.fused import FusedAdamW, FusedSGD
from promises.by_hand import SIDES, Prepared, Side, parameters
from promises.cases import batch, critic, each, fused_sgd, generator, loss_of, sgd, train, two_layers
from reliability.support import state_hash
from support.nets import LEVELS, dynamic, overflowing
from support.states import same

SCALE = 1024.0
DYNAMIC: dict[str, Any] = {"scale": halfpeak.ScaleConfig(init=SCALE)}


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


class Counting(torch.optim.SGD):
    """Counts its steps in the groups, as schedulefree and pytorch_optimizer do, and writes its learning rate."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), eps=1e-4),
    "torch's fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, fused=True),
    "FusedAdamW": lambda p: FusedAdamW(p, lr=0.01, eps=1e-4, backend="eager"),
    "FusedSGD": lambda p: FusedSGD(p, lr=0.1, momentum=0.9, backend="eager"),
    "counting": lambda p: Counting(p, lr=1.0, momentum=0.9),
}


def passes(engine: Engine, seed: int, factor: float = 1.0, **options: Any) -> None:
    with engine.forward():
        loss = engine.model(batch(seed)).float().square().mean() * factor
    engine.backward(loss, **options)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("first", [True, False])
def test_weights_state_and_statistics(
    level: str, optimizer: str, every: int, value: float, first: bool
) -> None:
    """In the first step, and in a later one. Only the scale falls."""
    model = normed()
    made = OPTIMIZERS[optimizer](model.parameters())
    engine = halfpeak.prepare(model, made, dynamic(level), accumulate=every, **DYNAMIC)
    schedule = torch.optim.lr_scheduler.ConstantLR(made, factor=1.0)

    def window(seed: int, bad: int | None) -> halfpeak.StepResult:
        for number in range(every):
            with overflowing(model[2].weight, value) if number == bad else overflowing(model[2].bias, 0.0):
                passes(engine, seed + number)
            result = engine.step()
        return result

    if not first:
        assert window(0, None).stepped()
    values, state = state_hash(model, engine.main_params()), state_hash(made)
    result = window(10, every // 2)
    schedule.step()  # it saw a call of optimizer.step(), so it does not warn
    assert not result.stepped()
    assert result.nonfinite() == ("2.weight",)
    assert state_hash(model, engine.main_params()) == values
    assert first or state_hash(made) == state  # a skipped first step may create an optimizer's empty state
    assert engine.read_scale() == SCALE / 2
    assert (int(engine.num_steps), int(engine.num_skipped)) == (int(not first), 1)
    assert not engine.is_open
    assert window(20, None).stepped()


# Several optimizers.


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("together", [True, False])
def test_optimizers_skip_together_or_each_for_itself(level: str, together: bool) -> None:
    """A GAN's loop need not say which of its losses is for which optimizer."""
    nets = generator() + critic()
    optimizers = each(nets)
    engine = halfpeak.prepare(nets, optimizers, halfpeak.LEVELS[level].replace(loss_scale=SCALE))
    before = [state_hash(net) for net in nets]
    for net, factor in zip(nets, (math.inf, 1.0), strict=True):
        with engine.forward():
            loss = net(batch(0)).float().square().mean() * factor
        engine.backward(loss)
    stepped = (
        [engine.step().stepped()] * 2
        if together
        else [engine.step(optimizers=one).stepped() for one in optimizers]
    )
    assert stepped == ([False, False] if together else [False, True])
    assert [state_hash(net) != old for net, old in zip(nets, before, strict=True)] == stepped


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clip", [None, 1.0, halfpeak.ClipNorm(max_norm=1.0, norm_type=1.0)])
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("bad", [0, 1])
def test_of_two_losses_only_the_scale_of_the_one_that_overflowed_falls(
    level: str, clip: Any, kind: Any, bad: int
) -> None:
    """Although the norm of the sum is not finite."""
    model = normed()
    engine = halfpeak.prepare(
        model, kind(model.parameters(), lr=0.1), dynamic(level), num_losses=2, clip=clip, **DYNAMIC
    )
    for loss_id in range(2):
        passes(engine, loss_id, math.inf if loss_id == bad else 1.0, loss_id=loss_id)
    assert not engine.step().stepped()
    assert [engine.read_scale(loss_id) for loss_id in range(2)] == [
        SCALE / 2 if loss_id == bad else SCALE for loss_id in range(2)
    ]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("write", [math.inf, math.nan, 2.0**100])
def test_an_inf_that_user_code_writes_skips_and_lowers_the_scales_of_all_losses_used(
    level: str, kind: Any, write: float
) -> None:
    """Nobody can tell whose it is. So it is with finite gradients whose norm is not finite."""
    model = normed()
    engine = halfpeak.prepare(
        model, kind(model.parameters(), lr=0.1), dynamic(level), num_losses=3, clip=1.0, **DYNAMIC
    )
    before = state_hash(model)
    for loss_id in (0, 2):
        passes(engine, loss_id, loss_id=loss_id)
    engine.unscale()
    grad = engine.main_params()[0].grad
    assert grad is not None
    grad.copy_(torch.tensor(write))  # infinite in float16
    assert not engine.step().stepped()
    assert state_hash(model) == before
    assert [engine.read_scale(loss_id) for loss_id in range(3)] == [SCALE / 2, SCALE, SCALE / 2]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD])
def test_clamping_an_inf_makes_no_gradient_of_it(level: str, kind: Any) -> None:
    model = normed()
    engine = halfpeak.prepare(model, kind(model.parameters(), lr=0.1), dynamic(level), **DYNAMIC)
    with overflowing(model[2].weight):
        passes(engine, 0)
    assert bool(engine.unscale())
    before = state_hash(model[0], model[2])
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert not engine.step().stepped()
    assert state_hash(model[0], model[2]) == before
    assert engine.read_scale() == SCALE / 2


@pytest.mark.filterwarnings("ignore:the gradients of each pass inside a window")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("makes", [sgd, fused_sgd])
def test_an_overflow_that_user_code_dropped_leaves_no_trace(
    level: str, side: Side, set_to_none: bool, every: int, makes: Any
) -> None:
    loop, calm = (Prepared(level, two_layers(), makes, every=every) for _ in range(2))
    for seed in range(2 * every):
        loop.backward(loss_of(loop, seed) * math.inf)
        loop.unscale()
        for one in (loop, calm):
            one.zero_grad(side, set_to_none)
            train(one, seed)
    assert int(loop.engine.num_skipped) == 0
    assert loop.engine.scalers[0].state_dict() == calm.engine.scalers[0].state_dict()
    assert same(loop.values(), calm.values())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_of_one_optimizer_that_was_dropped_skips_no_step_of_another(
    level: str, accumulate: int
) -> None:
    nets = generator() + critic()
    optimizers = each(nets)
    engine = halfpeak.prepare(
        nets, optimizers, halfpeak.LEVELS[level].replace(loss_scale=SCALE), accumulate=accumulate
    )
    before = state_hash(nets[1])
    for net, optimizer, factor in zip(nets, optimizers, (math.nan, 1.0), strict=True):
        with engine.forward():
            loss = net(batch(0)).float().square().mean() * factor
        engine.backward(loss, optimizers=optimizer)
        if accumulate == 2 or net is nets[1]:
            engine.step()
        optimizers[0].zero_grad()
    assert (int(engine.num_steps), int(engine.num_skipped)) == (1, 0)
    assert state_hash(nets[1]) != before


# A loss through the network of another engine.


def two_engines(level: str, kind: Any, **options: Any) -> tuple[Engine, Engine]:
    return tuple(  # type: ignore[return-value]
        halfpeak.prepare(nets, kind(parameters(nets), lr=0.1), dynamic(level), **{**DYNAMIC, **options})
        for nets in (generator(), critic())
    )


def fake(g: Engine, d: Engine, factor: float) -> None:
    with g.forward(), d.forward():
        loss = d.model(g.model(batch(0)).float()).float().square().mean() * factor
    g.backward(loss)


def real(d: Engine) -> None:
    with d.forward():
        loss = d.model(batch(1)).float().mean()
    d.backward(loss)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("steps", [0, 1])
def test_an_overflow_in_both_networks_lowers_the_scale_of_its_loss_once(
    level: str, kind: Any, steps: int
) -> None:
    """Both engines skip for it. A fused optimizer decides by itself after its first step."""
    g, d = two_engines(level, kind)
    for factor in [1.0] * steps + [math.inf]:
        fake(g, d, factor)
        assert g.step().stepped() == (factor == 1.0)
        assert d.step().stepped() == (factor == 1.0)
    assert (g.read_scale(), d.read_scale()) == (SCALE / 2, SCALE)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("order", [(math.inf, 1.0), (1.0, math.inf)])
def test_one_overflow_of_two_passes_through_another_network_is_enough(
    level: str, order: tuple[float, float]
) -> None:
    g, d = two_engines(level, torch.optim.SGD)
    for factor in order:
        fake(g, d, factor)
        g.abort()  # its own step does not move its scale
    real(d)
    assert not d.step().stepped()
    assert (g.read_scale(), d.read_scale()) == (SCALE / 2, SCALE)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD])
def test_an_overflow_dropped_from_another_network_lowers_no_scale(level: str, kind: Any) -> None:
    g, d = two_engines(level, kind)
    fake(g, d, math.inf)
    g.abort()
    d.optimizers[0].zero_grad()
    real(d)
    assert d.step().stepped()
    assert (g.read_scale(), d.read_scale()) == (SCALE, SCALE)


@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_of_leaves_that_nobody_prepared_keeps_nobody_from_stepping(level: str) -> None:
    """Neither of an input, nor of a parameter in no optimizer."""
    model = normed()
    engine = halfpeak.prepare(model, OPTIMIZERS["SGD"](model[0].parameters()), dynamic(level), **DYNAMIC)
    x = batch(0).requires_grad_()
    with overflowing(model[2].weight), overflowing(x):
        with engine.forward():
            loss = engine.model(x).float().square().mean()
        engine.backward(loss)
    assert engine.step().stepped()
    assert engine.read_scale() == SCALE


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_of_gradients_that_are_functions(level: str) -> None:
    model = normed()
    engine = halfpeak.prepare(model, OPTIMIZERS["SGD"](model.parameters()), dynamic(level), **DYNAMIC)
    passes(engine, 0, math.inf, create_graph=True)
    assert not engine.step().stepped()
    assert engine.read_scale() == SCALE / 2


# Steps that are none.


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("zeroes", ["nothing to zero", *SIDES])
def test_a_step_without_gradients_is_neither_a_step_nor_a_skip(
    level: str, optimizer: str, zeroes: str
) -> None:
    model = normed()
    made = OPTIMIZERS[optimizer](model.parameters())
    engine = halfpeak.prepare(model, made, dynamic(level), **DYNAMIC)
    before = state_hash(*model[::2], engine.main_params())
    if zeroes != "nothing to zero":
        passes(engine, 0, math.inf)
        (model if zeroes == "model" else made).zero_grad()
    result = engine.step()
    assert (result.stepped(), result.has_gradients, result.nonfinite()) == (False, False, ())
    assert state_hash(*model[::2], engine.main_params()) == before
    assert (int(engine.num_steps), int(engine.num_skipped), engine.micro_step) == (0, 0, 1)
    assert engine.read_scale() == SCALE


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("side", SIDES)
def test_a_step_of_the_optimizer_itself_after_zero_grad_moves_nothing(level: str, side: Side) -> None:
    model = normed()
    made = OPTIMIZERS["SGD"](model.parameters())
    engine = halfpeak.prepare(model, made, level)
    before = state_hash(*model[::2], engine.main_params())
    passes(engine, 0, 1.0)
    (model if side == "model" else made).zero_grad()
    made.step()
    assert state_hash(*model[::2], engine.main_params()) == before


@contextmanager
def after_step(optimizer: Optimizer, act: Callable[..., object]) -> Iterator[None]:
    handle = optimizer.register_step_post_hook(act)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_hook_writes_after_a_skipped_step_stays(level: str) -> None:
    model = normed()
    made = OPTIMIZERS["SGD"](model.parameters())
    engine = halfpeak.prepare(model, made, dynamic(level), **DYNAMIC)

    def look_and_write(*_: Any) -> None:
        model.eval()(batch(0))
        with torch.no_grad():
            model[0].weight.fill_(0.5)

    passes(engine, 0, math.inf)
    with after_step(made, look_and_write):
        assert not engine.step().stepped()
    assert bool((model.state_dict()["0.weight"] == 0.5).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("in_tensor", [False, True])
def test_settings_and_counts_of_the_groups_are_those_of_before(level: str, in_tensor: bool) -> None:
    """Also where the setting is a tensor that other code refers to."""
    model, lr = normed(), torch.tensor(0.5) if in_tensor else 0.5
    made = Counting(model.parameters(), lr=lr)
    engine = halfpeak.prepare(model, made, dynamic(level), **DYNAMIC)
    counts: list[tuple[Any, float]] = []
    for factor in (math.inf, 1.0, math.inf, 1.0):
        passes(engine, 0, factor)
        engine.step()
        counts.append((made.param_groups[0].get("step"), float(made.param_groups[0]["lr"])))
    assert counts == [(None, 0.5), (1, 0.25), (1, 0.25), (2, 0.125)]
    assert (made.param_groups[0]["lr"] is lr) is in_tensor
