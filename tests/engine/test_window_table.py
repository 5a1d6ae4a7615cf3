"""The window as a table: the value that each event leaves, starting from each of the four values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import halfpeak
from halfpeak import Engine, OrderError
from halfpeak.engine.gradients.window import Empty, Pending, Scaled, Unscaled
from halfpeak.fused import FusedAdamW
from support.nets import make_batch, make_net
from support.states import same

Event = Callable[[Engine], Any]


def loss_of(engine: Engine) -> Tensor:
    x, y = make_batch(0)
    with engine.forward():
        return torch.nn.functional.cross_entropy(engine.model(x).float(), y)


def backward(engine: Engine) -> None:
    engine.backward(loss_of(engine))


def delayed_backward(engine: Engine) -> None:
    with engine.scaled(loss_of(engine), delay=True) as scaled:
        scaled.backward()


def failing_backward(engine: Engine) -> None:
    try:
        with engine.scaled(loss_of(engine)) as scaled:
            scaled.backward()
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


def edit_and(then: Event) -> Event:
    def act(engine: Engine) -> None:
        for parameter in engine.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)
        then(engine)

    return act


def zero_grad(engine: Engine) -> None:
    engine.optimizers[0].zero_grad()
    engine.model.zero_grad()
    backward(engine)


E, U, S, P, X = Empty, Unscaled, Scaled, Pending, OrderError
EVENTS: dict[str, tuple[Event, tuple[type[Any], ...]]] = {
    "backward": (backward, (U, U, U, U)),
    "delayed backward": (delayed_backward, (S, S, S, S)),
    "backward that raises": (failing_backward, (E, U, E, U)),
    "look": (lambda engine: (engine.found_inf, engine.memory(), engine.main_params()), (E, U, S, P)),
    "unscale_pending": (lambda engine: engine.unscale_pending(), (E, U, S, U)),
    "unscale": (lambda engine: engine.unscale(), (E, U, X, U)),
    "read": (lambda engine: engine.main_grads(), (E, U, X, U)),
    "save": (lambda engine: engine.state_dict(), (E, U, S, U)),
    "zero_grad, backward": (zero_grad, (U, U, U, P)),
    "edit, step": (edit_and(Engine.step), (E, E, X, X)),
    "edit, save": (edit_and(Engine.state_dict), (E, U, X, X)),
    "step": (lambda engine: engine.step(), (E, E, X, E)),
    "optimizer.step": (lambda engine: engine.optimizers[0].step(), (E, X, X, X)),
    "abort": (lambda engine: engine.abort(), (E, E, E, E)),
}
"""Each event, and the window that it leaves of an empty, an unscaled, a scaled and a pending one, or the refusal."""


# At a scale that is always 1, without masters, pending gradients equal unscaled ones and may be edited.
PENDING_AT_SCALE_ONE = {"edit, step": Empty, "edit, save": Unscaled}
# Only O2 has a dynamic scale. Gradients that wait under a scale that is always 1 may be edited before the next pass.
SCALED_AT_SCALE_ONE = {"edit, save": Scaled}
# The model's low-precision parameters are edited, but the optimizer steps the gradients of their masters.
UNSCALED_WITH_MASTERS = {"edit, step": OrderError, "edit, save": OrderError}


def engine_in(window: type[Any], level: str) -> Engine:
    model = make_net()
    optimizer = FusedAdamW if window is Pending else torch.optim.AdamW
    engine = halfpeak.prepare(model, optimizer(model.parameters(), lr=0.01), level)
    if window is Scaled:
        delayed_backward(engine)
    elif window is not Empty:
        backward(engine)
    assert type(engine.context.prepared[0].window) is window
    return engine


@pytest.mark.parametrize("level", ["O0", "O2", "O4", "O5"])
@pytest.mark.parametrize("window", [E, U, S, P])
@pytest.mark.parametrize("event", EVENTS)
def test_what_an_event_makes_of_a_window(window: type[Any], event: str, level: str) -> None:
    engine, (act, left) = engine_in(window, level), EVENTS[event]
    expected = left[(E, U, S, P).index(window)]
    if window is Pending and level in ("O0", "O4"):
        expected = PENDING_AT_SCALE_ONE.get(event, expected)
    if window is Scaled and level != "O2":
        expected = SCALED_AT_SCALE_ONE.get(event, expected)
    if window is Unscaled and level in ("O2", "O5"):
        expected = UNSCALED_WITH_MASTERS.get(event, expected)
    before = [parameter.detach().clone() for parameter in engine.model.parameters()]
    if expected is OrderError:
        with pytest.raises(OrderError, match=r"engine\.|delay_unscale"):
            act(engine)
        assert same(engine.model.parameters(), before)
    else:
        act(engine)
        assert type(engine.context.prepared[0].window) is expected
