"""Scaler states of other libraries: a run moved at any step continues with the scales of the library's own rule."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.scale_models import Mmcv
from halfpeak.checkpoint import (
    ScalerState,
    from_apex,
    from_grad_scaler,
    from_mmcv,
    read_config,
    recognise,
    to_apex,
    to_grad_scaler,
    translate,
)
from halfpeak.core.errors import StateError
from halfpeak.core.schedule import ScaleConfig
from halfpeak.parts.loss_scaler import LossScaler

OURS: ScalerState = {"scale": 1024.0, "clean": 7, "grace": 1, "stuck": 0}
APEX = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}}
GRAD_SCALER = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 7,
}
MMCV = {
    "cur_scale": 1024.0,
    "cur_iter": 7,
    "mode": "dynamic",
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 2000,
}
EVERY = {
    "halfpeak": OURS,
    "apex": APEX,
    "grad_scaler": GRAD_SCALER,
    "mmcv": MMCV,
}


def continued(start: ScalerState, config: ScaleConfig, overflows: list[bool]) -> list[float]:
    scaler = LossScaler(config)
    scaler.load_state_dict(start)
    scales: list[float] = []
    for overflow in overflows:
        scaler.update(torch.tensor(float(overflow)))
        scales.append(scaler.read_scale())
    return scales


@pytest.mark.parametrize("name", EVERY)
def test_every_format_is_recognised_translated_and_left_alone(name: str) -> None:
    state = copy.deepcopy(EVERY[name])
    assert (recognise(state), translate(state)) == (name, [OURS])
    assert state == EVERY[name]


def test_to_and_from_are_inverse() -> None:
    many: list[ScalerState] = [{**OURS, "clean": i} for i in range(12)]
    assert from_apex(to_apex(many)) == many
    assert from_grad_scaler(to_grad_scaler(OURS)) == OURS
    assert (to_apex([OURS]), to_grad_scaler(OURS)) == (APEX, GRAD_SCALER)


def test_apex_goes_by_number_not_by_position() -> None:
    state = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(12)}
    assert from_apex(dict(sorted(state.items()))) == from_apex(state)
    assert [scaler["clean"] for scaler in from_apex(state)] == list(range(12))


@pytest.mark.parametrize("seed", range(5))
def test_from_mmcv_at_any_step(seed: int) -> None:
    rng = random.Random(seed)
    window, factor = rng.choice([1, 2, 3, 7]), rng.choice([2.0, 4.0])
    theirs = Mmcv(init=2.0**20, factor=factor, window=window)
    config = replace(theirs.config, ceiling=2.0**120)
    overflows = [rng.random() < 0.2 for _ in range(60)]
    states, scales = [], []
    for overflow in overflows:
        theirs.update(overflow)
        counts = {"cur_iter": theirs.iteration, "last_overflow_iter": theirs.last_overflow}
        states.append(
            {**MMCV, **counts, "cur_scale": theirs.scale, "scale_factor": factor, "scale_window": window}
        )
        scales.append(theirs.scale)
    for step, state in enumerate(states):
        assert read_config(state, config) == config
        assert continued(from_mmcv(state), config, overflows[step + 1 :]) == scales[step + 1 :]


def test_both_ways_with_torch() -> None:
    rng = random.Random(3)
    config = ScaleConfig(
        init=2.0**20, interval=3, growth=4.0, backoff=0.25, ceiling=2.0**120, floor=2.0**-120
    )
    settings = {"init_scale": 2.0**20, "growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25}
    overflows = [rng.random() < 0.3 for _ in range(40)]
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def update(scaler: Any, overflow: bool) -> None:
        scaler.scale(weight.sum())
        weight.grad = torch.full((1,), math.inf if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()

    theirs = torch.amp.GradScaler("cpu", **settings)
    theirs.scale(weight.sum())
    for step, overflow in enumerate(overflows):
        update(theirs, overflow)
        state = theirs.state_dict()
        assert read_config(state, config) == config
        again = torch.amp.GradScaler("cpu")
        again.load_state_dict(to_grad_scaler(from_grad_scaler(state), config))
        assert again.state_dict() == state
        rest = overflows[step + 1 : step + 9]
        scales = []
        for later in rest:
            update(again, later)
            scales.append(again.get_scale())
        assert continued(from_grad_scaler(state), config, rest) == scales


def test_configuration_that_comes_along() -> None:
    base = ScaleConfig(interval=5, hysteresis=2)
    assert read_config(APEX, base) == base
    assert read_config(OURS, base) == base
    assert read_config({**GRAD_SCALER, "growth_interval": 9}, base).interval == 9
    assert read_config({**MMCV, "mode": "static"}, base).dynamic is False
    assert read_config({**MMCV, "scale_factor": 4.0}, base).backoff == 0.25
    for broken in ({**GRAD_SCALER, "growth_factor": math.nan}, {**GRAD_SCALER, "growth_interval": 0}):
        with pytest.raises(StateError):
            read_config(broken)
    for broken in ({**MMCV, "scale_factor": 0}, {**MMCV, "scale_window": 0.5}):
        with pytest.raises(StateError):
            read_config(broken)


BAD_SCALES = [0, -1.0, math.nan, math.inf, "1024", None, True, 1e300, torch.tensor(2.0)]
BAD_COUNTS = [-1, 1.5, "3", None, True, 2**31, torch.tensor(2)]


@pytest.mark.parametrize("value", BAD_SCALES, ids=repr)
def test_bad_scales(value: Any) -> None:
    for state in (
        {**OURS, "scale": value},
        {"loss_scaler0": {"loss_scale": value, "unskipped": 0}},
        {**GRAD_SCALER, "scale": value},
        {**MMCV, "cur_scale": value},
    ):
        with pytest.raises(StateError):
            translate(state)
    for write in (to_grad_scaler, lambda one: to_apex([OURS, one])):
        with pytest.raises(StateError):
            write({**OURS, "scale": value})


@pytest.mark.parametrize("value", BAD_COUNTS, ids=repr)
def test_bad_counts(value: Any) -> None:
    for state in (
        {**OURS, "clean": value},
        {"loss_scaler0": {"loss_scale": 1.0, "unskipped": value}},
        {**GRAD_SCALER, "_growth_tracker": value},
        {**MMCV, "cur_iter": value},
        {**MMCV, "scale_window": value},
        {**MMCV, "last_overflow_iter": value if value != -1 else -2},
    ):
        with pytest.raises(StateError):
            translate(state)


@pytest.mark.parametrize(
    "state",
    [
        {},
        None,
        {**OURS, "more": 1},
        {**OURS, "grace": 1 - 2**31},  # which a loss scaler refuses, too
        {"loss_scaler": GRAD_SCALER},  # the state of an optimizer wrapper has one
        {"loss_scaler0": {"loss_scale": 1.0}},
        {"loss_scalerX": {"loss_scale": 1.0, "unskipped": 0}},
        {3: 4},
    ],
    ids=repr,
)
def test_states_of_nobody(state: Any) -> None:
    with pytest.raises(StateError):
        translate(state)


def test_what_a_message_says() -> None:
    with pytest.raises(StateError, match="disabled GradScaler"):
        from_grad_scaler({})
    with pytest.raises(StateError, match=r"missing are 'cur_scale', .*unknown 'scale'"):
        from_mmcv({**GRAD_SCALER, "more": 1})
    with pytest.raises(StateError, match="must be less than cur_iter"):
        from_mmcv({**MMCV, "last_overflow_iter": 7})
    with pytest.raises(StateError, match="unexpected key 'amp' in apex's state"):
        from_apex({**APEX, "amp": 1})
