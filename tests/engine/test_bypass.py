"""``loss.backward()`` in place of ``engine.backward(loss)`` is detected if its gradients would be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak import amp
from halfpeak.casting.casts import OpCasts
from halfpeak.core.errors import OrderError
from halfpeak.fused import FusedAdamW, FusedSGD
from reliability.support import state_hash
from support.states import same

WITH_MASTERS = ("O2", "O5")
WITHOUT = ("O0", "O1", "O4")


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 4)).float().square().sum()


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("step", [halfpeak.Engine.step, lambda engine: engine.optimizers[0].step()])
def test_the_engine_refuses_and_trains_on(
    level: str, steps_before: int, step: Callable[[halfpeak.Engine], object]
) -> None:
    """Also where the loop was not changed at all, and the optimizer steps itself."""
    model, optimizer = net()
    engine = halfpeak.prepare(model, optimizer, level, loss_scale=8.0)
    for _ in range(steps_before):
        engine.backward(loss_of(model))
        engine.step()
    before = weights(model)
    loss_of(model).backward()
    with pytest.raises(OrderError, match=r"engine\.backward\(loss\)"):
        step(engine)
    assert same(weights(model), before)
    engine.backward(loss_of(model))
    assert engine.step().stepped()
    assert not any(map(torch.equal, weights(model), before))


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_the_door_refuses_and_trains_on(level: str) -> None:
    model, optimizer = amp.initialize(*net(), opt_level=level, verbosity=0, loss_scale=8.0)
    before = weights(model)
    loss_of(model).backward()
    with pytest.raises(halfpeak.OrderError, match=r"amp\.scale_loss"):
        optimizer.step()
    assert same(weights(model), before)
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not any(map(torch.equal, weights(model), before))


@pytest.mark.parametrize("level", WITHOUT)
def test_without_masters_it_is_a_plain_step_at_o0_alone(level: str) -> None:
    model, optimizer = net()
    engine = halfpeak.prepare(model, optimizer, level)
    before = weights(model)
    loss_of(model).backward()
    if level == "O0":
        engine.step()
        assert not any(map(torch.equal, weights(model), before))
    else:
        with pytest.raises(OrderError, match=r"engine\.backward\(loss\).*adopt_scaled_grads"):
            engine.step()
        assert same(weights(model), before)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_forward_pass_outside_of_the_casts(level: str) -> None:
    model, optimizer = net()
    engine = halfpeak.prepare(model, optimizer, level, loss_scale=8.0)
    for _ in range(2):
        with pytest.raises(OrderError, match=r"outside engine\.forward\(\)"):
            engine.backward(loss_of(model))
        loss_of(model)  # a probe without a backward pass
        with engine.forward():
            loss = loss_of(model)
        loss_of(model)
        engine.backward(loss)
        assert engine.step().stepped()
        with torch.no_grad():
            loss_of(model)
        for casts in (torch.autocast("cpu"), OpCasts(torch.bfloat16)):
            with casts:
                loss = loss_of(model)
            engine.backward(loss)
            assert engine.step().stepped()


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdamW])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("flat", [False, True])
def test_gradients_assigned_to_the_model_where_masters_have_them(
    level: str, kind: Any, passes: int, flat: bool
) -> None:
    """A-GEM and gradient centralization assign ``p.grad`` where there is one: nothing of it would be stepped."""
    model, _ = net()
    engine = halfpeak.prepare(model, kind(model.parameters(), lr=0.1), level)
    for _ in range(passes):
        engine.backward(loss_of(model))
    before = weights(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            projected = torch.cat([parameter.grad.flatten() * 0.5] * (2 if flat else 1))
            parameter.grad = projected[: parameter.numel()].view_as(parameter)
    with pytest.raises(OrderError, match="gradients"):
        engine.step()
    assert same(weights(model), before)


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdamW])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_clipping_gradients_of_the_model_where_masters_have_them(
    level: str, kind: Any, max_norm: float
) -> None:
    model, _ = net()
    engine = halfpeak.prepare(model, kind(model.parameters(), lr=0.1), level)
    engine.backward(loss_of(model))
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    before = weights(model)
    with pytest.raises(OrderError, match=r"halfpeak\.prepare\(\.\.\., clip=1\.0\)"):
        engine.step()
    assert same(weights(model), before)
    engine.backward(loss_of(model))
    engine.unscale()
    norm = nn.utils.clip_grad_norm_(engine.main_params(), max_norm)
    assert norm > 0.01
    assert engine.step().stepped()


@pytest.mark.parametrize("level", [*WITH_MASTERS, *WITHOUT])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdamW])
@pytest.mark.parametrize("zero", ["nothing", "model", "optimizer"])
def test_a_step_without_gradients_is_none(level: str, kind: Any, zero: str) -> None:
    model, _ = net()
    optimizer = kind(model.parameters(), lr=0.1)
    engine = halfpeak.prepare(model, optimizer, level)
    before = state_hash(model, optimizer)
    if zero != "nothing":
        with engine.forward():
            loss = loss_of(model)
        engine.backward(loss)
        (model if zero == "model" else optimizer).zero_grad()
    assert not engine.step().stepped()
    assert state_hash(model, optimizer) == before
    assert (int(engine.num_steps), int(engine.num_skipped), engine.micro_step) == (0, 0, 1)


@pytest.mark.parametrize("level", [*WITH_MASTERS, *WITHOUT])
def test_what_another_loss_left_is_no_mistake(level: str) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (first, second)]
    (first, second), (of_first, of_second) = amp.initialize(
        [first, second], optimizers, opt_level=level, verbosity=0, loss_scale=8.0
    )
    for _ in range(2):
        of_second.zero_grad()
        with amp.scale_loss(loss_of(second), of_second) as scaled:
            scaled.backward()
        with amp.scale_loss(loss_of(nn.Sequential(first, second)), of_first) as scaled:
            scaled.backward()
        of_second.step()
        of_first.step()
        assert all(amp.last_step(optimizer).stepped() for optimizer in (of_first, of_second))
        of_first.zero_grad()


@pytest.mark.parametrize("level", WITHOUT)
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("order", ["past", "engine-past", "past-engine"])
@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_a_backward_pass_past_the_engine_then_a_step(level: str, kind: Any, order: str, value: float) -> None:
    """Gradients that bypass the engine lie unscaled on float32 weights, so a step uses them, too, if all are finite."""
    model = nn.Linear(3, 2)
    engine = halfpeak.prepare(model, kind(model.parameters(), lr=0.1), level, loss_scale=64.0, accumulate=1)
    before = model.bias.detach().clone()
    for who in order.split("-"):
        with engine.forward():
            loss = model(torch.ones(4, 3)).float().sum(dim=1).mean()
        if who == "past":
            (loss * value).backward()
        else:
            engine.backward(loss)
    if kind is FusedSGD and order == "engine-past":
        # The gradients were pending, still scaled, so it is unknown whether the addition was scaled.
        with pytest.raises(OrderError, match="for every loss"):
            engine.step()
        return
    if order == "past" and level != "O0":
        with pytest.raises(OrderError, match="no backward pass of this step"):
            engine.step()
        return
    result = engine.step()
    assert result.stepped() == (value == 1.0)
    moved = 0.1 * len(order.split("-")) if value == 1.0 else 0.0
    torch.testing.assert_close(model.bias.detach(), before - moved)
    assert engine.read_scale() == 64.0


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("level", [*WITHOUT, *WITH_MASTERS])
def test_passes_of_the_callers_own_are_adopted_after_the_last_of_a_window(level: str, make: type) -> None:
    def run(*, own: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, _ = net()
        engine = halfpeak.prepare(
            model, make(model.parameters(), lr=0.1), level, loss_scale=8.0, accumulate=2
        )
        for number in range(4):
            with engine.forward():
                loss = loss_of(model)
            if not own:
                engine.backward(loss)
            else:
                (loss * engine.scale / 2).backward()
                if number % 2:
                    engine.adopt_scaled_grads()
            engine.step()
        return weights(model)

    for ours, theirs in zip(run(own=True), run(own=False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-2)


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("level", [*WITHOUT, *WITH_MASTERS])
def test_a_pass_of_the_callers_own_beside_unscaled_gradients_is_refused(level: str, make: type) -> None:
    """Where there is no master, autograd has added scaled gradients to unscaled ones."""
    model, _ = net()
    engine = halfpeak.prepare(model, make(model.parameters(), lr=0.1), level, loss_scale=8.0, accumulate=2)
    for number in range(2):
        with engine.forward():
            loss = loss_of(model)
        (loss * engine.scale / 2).backward()
        if number == 0:
            engine.adopt_scaled_grads()
            engine.step()
    with pytest.raises(OrderError, match="once, after the last pass of the window"):
        engine.adopt_scaled_grads()
