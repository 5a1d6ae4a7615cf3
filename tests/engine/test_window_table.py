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


EVENTS: dict[str, Event] = {
    "backward": backward,
    "delayed backward": delayed_backward,
    "backward that raises": failing_backward,
    "look": lambda engine: (engine.found_inf, engine.memory(), engine.main_params()),
    "accumulate": lambda engine: engine.accumulate(),
    "unscale": lambda engine: engine.unscale(),
    "read": lambda engine: engine.main_grads(),
    "save": lambda engine: engine.state_dict(),
    "zero_grad, backward": zero_grad,
    "edit, step": edit_and(Engine.step),
    "edit, save": edit_and(Engine.state_dict),
    "step": lambda engine: engine.step(),
    "optimizer.step": lambda engine: engine.optimizers[0].step(),
    "abort": lambda engine: engine.abort(),
}

TABLE: dict[type[Any], dict[str, type[Any]]] = {
    Empty: {
        "backward": Unscaled,
        "delayed backward": Scaled,
        "backward that raises": Empty,
        "look": Empty,
        "accumulate": Empty,
        "unscale": Empty,
        "read": Empty,
        "save": Empty,
        "zero_grad, backward": Unscaled,
        "edit, step": Empty,
        "edit, save": Empty,
        "step": Empty,
        "optimizer.step": Empty,
        "abort": Empty,
    },
    Unscaled: {
        "backward": Unscaled,
        "delayed backward": Scaled,
        "backward that raises": Unscaled,
        "look": Unscaled,
        "accumulate": Unscaled,
        "unscale": Unscaled,
        "read": Unscaled,
        "save": Unscaled,
        "zero_grad, backward": Unscaled,
        "edit, step": Empty,
        "edit, save": Unscaled,
        "step": Empty,
        "optimizer.step": OrderError,
        "abort": Empty,
    },
    Scaled: {
        "backward": Unscaled,
        "delayed backward": Scaled,
        "backward that raises": Empty,
        "look": Scaled,
        "accumulate": Scaled,
        "unscale": OrderError,
        "read": OrderError,
        "save": Scaled,
        "zero_grad, backward": Unscaled,
        "edit, step": OrderError,
        "edit, save": OrderError,
        "step": OrderError,
        "optimizer.step": OrderError,
        "abort": Empty,
    },
    Pending: {
        "backward": Unscaled,
        "delayed backward": Scaled,
        "backward that raises": Unscaled,
        "look": Pending,
        "accumulate": Unscaled,
        "unscale": Unscaled,
        "read": Unscaled,
        "save": Unscaled,
        "zero_grad, backward": Pending,
        "edit, step": OrderError,
        "edit, save": OrderError,
        "step": Empty,
        "optimizer.step": OrderError,
        "abort": Empty,
    },
}


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
@pytest.mark.parametrize(
    ("window", "event"), [(window, event) for window, row in TABLE.items() for event in row]
)
def test_what_an_event_makes_of_a_window(window: type[Any], event: str, level: str) -> None:
    engine, expected = engine_in(window, level), TABLE[window][event]
    if window is Pending and level in ("O0", "O4"):
        expected = PENDING_AT_SCALE_ONE.get(event, expected)
    if window is Scaled and level != "O2":
        expected = SCALED_AT_SCALE_ONE.get(event, expected)
    if window is Unscaled and level in ("O2", "O5"):
        expected = UNSCALED_WITH_MASTERS.get(event, expected)
    before = [parameter.detach().clone() for parameter in engine.model.parameters()]
    if expected is OrderError:
        with pytest.raises(OrderError, match=r"engine\.|delay_unscale"):
            EVENTS[event](engine)
        assert same(engine.model.parameters(), before)
    else:
        EVENTS[event](engine)
        assert type(engine.context.prepared[0].window) is expected


def test_every_event_stands_in_every_row() -> None:
    assert all(row.keys() == EVENTS.keys() for row in TABLE.values())
