"""Dtypes and their names, ``StepResult``, and the built-in exceptions as which old code catches halfpeak's errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from halfpeak.core import errors
from halfpeak.core.dtypes import LOW, NAMES, is_low, largest, parse_dtype
from halfpeak.core.step_result import StepResult

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", REAL)
def test_a_dtype_parses_back_from_itself_and_its_name(dtype: torch.dtype) -> None:
    assert parse_dtype(dtype) is dtype
    assert parse_dtype(str(dtype)) is dtype
    assert parse_dtype(str(dtype).removeprefix("torch.")) is dtype


def test_every_name_means_what_torch_means_by_it() -> None:
    assert set(NAMES.values()) == set(REAL)
    assert all(parse_dtype(name) is dtype for name, dtype in NAMES.items())
    shared = NAMES.keys() & vars(torch).keys()
    assert shared >= {"half", "float", "double"}
    assert all(getattr(torch, name) is NAMES[name] for name in shared)


@pytest.mark.parametrize(
    "value", ["int8", "FP16", "", "float8", torch.int64, torch.bool, torch.complex64, None, 16, []]
)
def test_what_is_no_floating_dtype_is_refused(value: Any) -> None:
    with pytest.raises(errors.ConfigError, match="float16"):
        parse_dtype(value)


def test_low_is_sixteen_bits() -> None:
    assert {dtype for dtype in REAL if torch.finfo(dtype).bits == 16} == LOW
    assert [is_low(torch.zeros(1, dtype=dtype)) for dtype in REAL] == [True, True, False, False]


@pytest.mark.parametrize("dtype", REAL)
def test_the_largest_value_is_the_last_finite_one(dtype: torch.dtype) -> None:
    value = torch.tensor(largest(dtype), dtype=dtype)
    assert value.isfinite()
    assert torch.nextafter(value.double(), torch.tensor(torch.inf).double()).to(dtype) >= value
    assert not (value * 1.01).isfinite()


@pytest.mark.parametrize(
    ("found_inf", "boundary", "stepped"),
    [(0.0, True, True), (1.0, True, False), (0.0, False, False), (1.0, False, False)],
)
def test_a_step_happened_when_a_window_ended_without_overflow(
    found_inf: float, boundary: bool, stepped: bool
) -> None:
    assert StepResult(torch.tensor(found_inf), torch.ones(()), boundary=boundary).stepped() is stepped


CAUGHT_AS = [
    # the exception that code for the older API catches, and halfpeak's error in its place
    (RuntimeError, errors.ConfigError),
    (ValueError, errors.ConfigError),
    (TypeError, errors.ConfigTypeError),
    (ValueError, errors.ConfigTypeError),
    (IndexError, errors.LossIdError),
    (LookupError, errors.LossIdError),
    (RuntimeError, errors.OrderError),
    (RuntimeError, errors.ClosureError),
    (TypeError, errors.ParameterError),
    (RuntimeError, errors.StateError),
    (ValueError, errors.StateError),
    (RuntimeError, errors.CheckpointError),
    (NotImplementedError, errors.BannedOpError),
    (ArithmeticError, errors.LossScaleCollapse),
    (RuntimeError, errors.LossScaleCollapse),
    (RuntimeError, errors.RankMismatchError),
]


@pytest.mark.parametrize(("builtin", "error"), CAUGHT_AS)
def test_old_except_clauses_catch(builtin: type[Exception], error: type[errors.HalfpeakError]) -> None:
    with pytest.raises(builtin, match="why"):
        raise error("why")
    assert issubclass(error, errors.HalfpeakError)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))]
)
def test_a_collapse_keeps_its_parameters(duplicate: Any) -> None:
    again = duplicate(errors.LossScaleCollapse("why", ("a.weight", "b")))
    assert (type(again), str(again), again.parameters) == (errors.LossScaleCollapse, "why", ("a.weight", "b"))
