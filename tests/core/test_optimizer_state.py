"""``check_optimizer_state``: each error names the value and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD

from halfpeak.core.errors import StateError
from halfpeak.core.optimizer_state import check_optimizer_state

TWICE = [1.0]
DEEP: list[Any] = []
for _ in range(20):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([TWICE, TWICE], "history of parameter 0 contains the same list twice; put a copy"),
        (DEEP, "history of parameter 0 has more than 16 levels of dicts and lists"),
        ("text", "history of parameter 0 is 'text'; only numbers and tensors"),
        ([1.0, {"name": "text"}], "history of parameter 0 contains 'text'; only numbers and tensors"),
    ],
)
def test_what_a_state_cannot_hold(value: object, message: str) -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    state = optimizer.state_dict()
    state["state"] = {0: {"history": value}}
    with pytest.raises(StateError, match=message):
        check_optimizer_state(optimizer, state)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([[0]], r"groups of \[2\] parameters, the state dict of \[1\]"),
        ([[0, None]], "must be integers or strings, not None"),
        ([[0, 0]], "parameter 0 is in the state's parameter groups twice"),
        ([[0, 2]], "state for parameter 1, which is in none of its param_groups"),
    ],
)
def test_parameters_that_do_not_match(params: list[list[Any]], message: str) -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(2)) for _ in range(2)], lr=0.1)
    state = optimizer.state_dict()
    state["state"] = {1: {"momentum_buffer": torch.ones(2)}}
    for group, names in zip(state["param_groups"], params, strict=True):
        group["params"] = names
    with pytest.raises(StateError, match=message):
        check_optimizer_state(optimizer, state)


def test_a_key_that_a_scheduler_added_to_a_group_requires_no_state() -> None:
    """mmengine's schedulers of momentum put ``momentum`` into the groups of Adam, beside ``betas``."""

    def make() -> torch.optim.Adam:
        return torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])

    optimizer = make()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.8
    check_optimizer_state(make(), optimizer.state_dict())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in (
        *(torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax),
        *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
    )
} | {"SGD": lambda params: SGD(params, lr=0.1, momentum=0.9)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_group_without_a_setting_is_refused_or_can_be_stepped(name: str) -> None:
    """torch fills in settings that its later versions have added; without another the next step raises KeyError."""

    def trained() -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        optimizer = OPTIMIZERS[name]([weight])
        optimizer.step()
        return optimizer

    settings = trained().state_dict()["param_groups"][0].keys() - {"params"}
    refused: list[str] = []
    for setting in sorted(settings):
        optimizer, state = trained(), trained().state_dict()
        del state["param_groups"][0][setting]
        try:
            check_optimizer_state(optimizer, state)
        except StateError:
            refused.append(setting)
        else:
            optimizer.load_state_dict(state)
            optimizer.step()
    assert "lr" in refused
