"""``LossScaler``: what it scales, the state that it keeps, and the states that it refuses to load."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from halfpeak.core.errors import StateError
from halfpeak.core.schedule import ScaleConfig, ScaleState
from halfpeak.parts.loss_scaler import LossScaler, scale_loss
from support.states import differences

FIELDS = ScaleState._fields


def moved(flags: str, **config: Any) -> LossScaler:
    """Make a scaler and update it with one found_inf per character."""
    scaler = LossScaler(ScaleConfig(**{"init": 64.0, "interval": 3, "floor": 4.0, **config}))
    for flag in flags:
        scaler.update(torch.tensor(float(flag)))
    return scaler


@pytest.mark.parametrize("flags", ["", "0", "00", "000", "1", "0001", "11111111", "0000010001110"])
@pytest.mark.parametrize("hysteresis", [1, 3])
def test_a_state_loads_as_it_was_saved(flags: str, hysteresis: int) -> None:
    scaler = moved(flags, hysteresis=hysteresis)
    other = moved("0101", hysteresis=hysteresis)
    other.load_state_dict(scaler.state_dict())
    assert not differences(other.state, scaler.state)
    assert other.state_dict() == scaler.state_dict()
    for found_inf in (0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0):
        scaler.update(torch.tensor(found_inf))
        other.update(torch.tensor(found_inf))
        assert not differences(other.state, scaler.state)


def test_a_state_is_plain_and_has_every_field() -> None:
    state = moved("0011111", hysteresis=2).state_dict()
    assert tuple(state) == FIELDS
    assert {type(value) for value in state.values()} == {int, float}
    assert state == {"scale": 4.0, "clean": 0, "grace": -3, "stuck": 0}


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_restored(field: str) -> None:
    scaler = moved("")
    state = {**scaler.state_dict(), field: 7}
    scaler.load_state_dict(state)
    assert scaler.state_dict() == {**state, "scale": float(state["scale"])}


REFUSED: list[Any] = [
    None,
    [],
    "scale",
    {},
    {"scale": 1.0},
    {"scale": 1.0, "clean": 0, "grace": 1, "stuck": 0, "more": 0},
    {"loss_scale": 1.0, "unskipped": 0},
    *(
        {"scale": 8.0, "clean": 0, "grace": 1, "stuck": 0, field: value}
        for field, value in itertools.product(
            ("clean", "grace", "stuck"), (1.0, "1", None, True, 2**31, -(2**31), [1], torch.ones(()))
        )
    ),
    {"scale": 8.0, "clean": -1, "grace": 1, "stuck": 0},
    {"scale": 8.0, "clean": 0, "grace": 1, "stuck": -1},
    {"scale": 0.0, "clean": 0, "grace": 1, "stuck": 0},
]


@pytest.mark.parametrize("state", REFUSED, ids=repr)
def test_a_refused_state_changes_nothing(state: Any) -> None:
    scaler = moved("0010")
    before, given = scaler.state, repr(state)
    with pytest.raises(StateError):
        scaler.load_state_dict(state)
    assert scaler.state is before
    assert repr(state) == given


def test_setting_the_scale_keeps_the_counters() -> None:
    scaler = moved("00", hysteresis=2)
    before = scaler.state
    scaler.set_scale(2)
    assert scaler.read_scale() == 2.0
    assert not differences(scaler.state._replace(scale=before.scale), before)


def test_patience_counts_overflows_that_could_not_lower_the_scale() -> None:
    scaler = LossScaler(ScaleConfig(init=8.0, floor=4.0, patience=2))
    seen = []
    for found_inf in (1.0, 1.0, 1.0, 0.0, 1.0, 1.0):
        scaler.update(torch.tensor(found_inf))
        seen.append(scaler.read_exhausted())
    assert seen == [False, False, True, False, False, True]


def test_a_static_scale_is_exhausted_too_and_patience_can_be_endless() -> None:
    static, endless = (LossScaler(ScaleConfig.static(patience=patience)) for patience in (3, None))
    for _ in range(3):
        static.update(torch.ones(()))
        endless.update(torch.ones(()))
    assert static.read_exhausted()
    assert not endless.read_exhausted()


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
        (torch.complex128, torch.complex128),
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_a_loss_is_scaled_in_float32_or_wider(
    dtype: torch.dtype, wide: torch.dtype, shape: tuple[int, ...]
) -> None:
    loss = torch.full(shape, 60000.0, dtype=dtype, requires_grad=True)
    scaled = scale_loss(loss, torch.tensor(1024.0))
    assert (scaled.dtype, scaled.shape) == (wide, loss.shape)
    assert torch.equal(scaled, loss.detach().to(wide) * 1024.0)
    (grad,) = torch.autograd.grad(scaled.abs().sum(), loss)
    assert torch.equal(grad, torch.full_like(grad, 1024.0))
