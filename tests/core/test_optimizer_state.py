"""``check_optimizer_state``: each error names the value and what is wrong with it."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD

from halfpeak.core.errors import StateError
from halfpeak.core.optimizer_state import check_optimizer_state

TWICE = [1.0]
Pair = namedtuple("Pair", "a b")
DEEP: list[Any] = []
for _ in range(20):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([TWICE, TWICE], "should be of at most 16 levels of dicts and lists, none of which is in it twice"),
        (DEEP, "should be of at most 16 levels of dicts and lists, none of which is in it twice"),
        ("text", "is 'text' and should be a number or a tensor"),
        (Pair(1.0, 2.0), r"is \(1.0, 2.0\) and should be a number or a tensor"),
        ([1.0, {"name": "text"}], "is 'text' and should be a number or a tensor"),
    ],
)
def test_what_a_state_cannot_hold(value: object, message: str) -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    state = optimizer.state_dict()
    state["state"] = {0: {"history": value}}
    with pytest.raises(StateError, match=rf"^state\['state'\]\[0\]\['history'\].* {message}; pass what"):
        check_optimizer_state(optimizer, state)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([[0]], r"state\['param_groups'\]\[0\]\['params'\] is \[0\] and should be a list of 2"),
        ([[0, None]], r"\['params'\]\[1\] is None and should be int | str"),
        ([[0, 0]], r"parameters of state is \[0, 0\] and should be one that has none twice"),
        ([[0, 2]], r"state\['state'\] does not fit: missing are none, unknown 1"),
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


def test_a_key_of_a_group_that_the_optimizer_does_not_read_may_be_any_tensor() -> None:
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["amsgrad"] = torch.ones(3)
    check_optimizer_state(optimizer, state)


@pytest.mark.parametrize("more", [None, 1.5, torch.ones(3), {}], ids=repr)
def test_steps_in_numbers_beside_the_state_of_no_parameter(more: object) -> None:
    def make() -> torch.optim.Optimizer:
        return torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])

    optimizer = make()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"] = {0: {**state["state"][0], "step": 1.0}, "more": more}
    check_optimizer_state(make(), state)
    make().load_state_dict(state)


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
