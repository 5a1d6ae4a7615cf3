"""``require``: what each kind of schema takes and refuses, and where the message says that it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfpeak.core.errors import StateError
from halfpeak.core.state_checks import NotRequired, Schema, require, require_count

ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"a": int, "b": NotRequired(int)}, {"a": 1}),
        ({"a": int, str: ...}, {"a": 1, "more": object()}),
        ({object: int}, {None: 1, 2: 2}),
        ({1: int}, {1: 1}),
        ([int, str], (1, "x")),
        ([int, ...], []),
        ([int, ...], [1, 2, 3]),
        ([..., ...], [1, "x"]),
        (int | str, "x"),
        (bool | None, None),
        (ONES, ONES.double()),
        (require_count, 3),
        (..., object()),
    ],
)
def test_what_fits_is_returned(schema: Schema, value: Any) -> None:
    assert require(value, "state", schema) is value


@pytest.mark.parametrize(
    ("schema", "value", "message"),
    [
        ({"a": int}, {}, "state does not fit: missing are 'a', unknown none"),
        ({"a": int}, {"a": 1, "b": 2}, "state does not fit: missing are none, unknown 'b'"),
        ({"a": NotRequired(int)}, {"a": "x"}, r"state\['a'\] is 'x' and should be int"),
        ({"a": int, str: ...}, {"a": 1, 2: 2}, "unknown 2"),
        ({1: int}, {True: 1}, "unknown True"),
        ({1: NotRequired(int)}, {1.0: 1}, "unknown 1.0"),
        ({str: int}, {str: 1}, "unknown <class 'str'>"),
        ({"a": int}, [1], r"state is \[1\] and should be a dict"),
        ([int, int], [1], r"state is \[1\] and should be a list of 2"),
        ([int, ...], [1, "x"], r"state\[1\] is 'x' and should be int"),
        ([int, ...], {1}, r"state is \{1\} and should be a list"),
        (int, True, "state is True and should be int"),
        (int | None, False, r"state is False and should be int \| None"),
        (
            ONES,
            torch.ones(3),
            r"a float32 tensor of \(3,\) and should be a dense floating-point tensor of \(2,\)",
        ),
        (ONES, ONES.int(), "a int32 tensor .* a dense floating-point tensor"),
        (ONES, ONES.to("meta"), r"\(strided, meta\) and should be a dense"),
        (ONES, None, "state is None and should be a dense"),
        (
            {"a": {"b": [require_count, ...]}},
            {"a": {"b": [1, -1]}},
            r"state\['a'\]\['b'\]\[1\] is -1 and should be",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(schema: Schema, value: Any, message: str) -> None:
    with pytest.raises(StateError, match=f"^(.* )?{message}.*; pass what state_dict"):
        require(value, "state", schema)
