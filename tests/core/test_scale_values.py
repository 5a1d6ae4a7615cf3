"""Every entry point refuses loss scales that could end a run, and has changed nothing when it raises."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import halfpeak
from halfpeak import amp
from halfpeak.core.errors import HalfpeakError
from halfpeak.core.schedule import ScaleConfig
from halfpeak.parts.loss_scaler import LossScaler

BAD: list[Any] = [
    0,
    0.0,
    -0.0,
    -1,
    -1.0,
    -65536.0,
    math.nan,
    -math.nan,
    math.inf,
    -math.inf,
    5e-324,
    1e-300,
    1e-40,
    2.0**-127,
    2.0**128,
    1e39,
    1e300,
    10**39,
    10**400,
    -(10**400),
    "",
    "abc",
    "Dynamic",
    "static",
    "0",
    "-1",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e-60",
    [],
    [1.0],
    (1.0, 2.0),
    {},
    {"loss_scale": 1.0},
    SimpleNamespace(),
    1j,
    range(3),
    torch.tensor(math.nan),
    torch.tensor(0.0),
    torch.ones(2),
    float,
]

BAD_AS_NUMBERS: list[Any] = [True, False, None, "128", b"128", "128.0", Decimal(128), torch.tensor(128.0)]
"""Values that only the front end accepts: it converts with ``float``, as apex did, and None is its default."""


def construct(value: Any) -> None:
    ScaleConfig(init=value)


def construct_static(value: Any) -> None:
    ScaleConfig.static(value)


def load(value: Any) -> None:
    scaler = LossScaler(ScaleConfig(init=8.0))
    state = {**scaler.state_dict(), "scale": value}
    given = dict(state)
    before = scaler.state
    try:
        scaler.load_state_dict(state)
    finally:
        assert scaler.state is before
        assert state.keys() == given.keys()


def set_scale(value: Any) -> None:
    scaler = LossScaler(ScaleConfig(init=8.0))
    before = scaler.state
    try:
        scaler.set_scale(value)
    finally:
        assert scaler.state is before


def enter(value: Any, front_end: Callable[..., Any], **kwargs: Any) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = (set(vars(model)), set(vars(optimizer)), copy.deepcopy(model.state_dict()))
    try:
        front_end(model, optimizer, loss_scale=value, **kwargs)
    finally:
        after = (set(vars(model)), set(vars(optimizer)), model.state_dict())
        assert after[:2] == before[:2]
        assert all(torch.equal(after[2][key], before[2][key]) for key in before[2])
        assert model.weight.dtype is torch.float32
        assert not any((model._forward_hooks, model._forward_pre_hooks, optimizer._optimizer_step_pre_hooks))


def initialize(value: Any) -> None:
    enter(value, amp.initialize, opt_level="O2", verbosity=0)


def prepare(value: Any) -> None:
    halfpeak.LEVELS["O2"].replace(loss_scale=value)


@pytest.mark.parametrize("value", BAD + BAD_AS_NUMBERS, ids=repr)
def test_a_bad_scale_is_refused_everywhere(value: Any) -> None:
    looks_like_a_number = any(value is bad for bad in BAD_AS_NUMBERS)
    for entry in (construct, construct_static, load, set_scale, initialize, prepare)[
        : 4 if looks_like_a_number else 6
    ]:
        with pytest.raises(HalfpeakError) as caught:
            entry(value)
        assert looks_like_a_number or isinstance(caught.value, ValueError)
        assert looks_like_a_number or isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("name", ["min_loss_scale", "max_loss_scale"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e39, "4", 1e-60], ids=repr)
def test_a_bad_bound_is_refused_at_the_door(name: str, value: Any) -> None:
    with pytest.raises(HalfpeakError, match=name):
        enter(None, amp.initialize, opt_level="O2", verbosity=0, **{name: value})
