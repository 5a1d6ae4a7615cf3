"""The loss-scale rule for a state in host memory, in Python numbers, compared with the rule for tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfpeak.core.schedule import NONFINITE_LOSS, ScaleConfig, ScaleState, advance
from halfpeak.core.torch_compat import host_values

BOUNDS = st.sampled_from([2.0**-14, 1.0, 3.7, 128.0])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "init": st.sampled_from([2.0**-20, 0.3, 1.0, 2.0**16, 2.0**32, 3.3e38]),
    "dynamic": st.booleans(),
    "growth": st.sampled_from([1.0, 1.1, 2.0, 1e30]),
    "backoff": st.sampled_from([1.0, 0.9, 0.5, 1e-30]),
    "interval": st.sampled_from([1, 2, 3, 4, 14]),
    "hysteresis": st.integers(1, 3),
    "refill": st.sampled_from(["clean", "growth"]),
    "floor": BOUNDS,
    "ceiling": st.sampled_from([128.0, 2.0**24, 3.3e38]),
    "recovers": st.booleans(),
}
CONFIGS = st.builds(ScaleConfig, **FIELDS)
FOUND_INFS = st.lists(st.sampled_from([0.0, 0.0, 1.0, NONFINITE_LOSS, float("nan")]), min_size=1, max_size=30)


def test_every_number_that_moves_the_scale_is_varied_below() -> None:
    """The kernel's counterpart is ``CONFIGS`` of tests/fused/test_triton_backend.py. ``patience`` moves no scale."""
    assert FIELDS.keys() == {field.name for field in dataclasses.fields(ScaleConfig)} - {"patience"}


def by_tensors(config: ScaleConfig, state: ScaleState, found_inf: Tensor) -> ScaleState:
    batch = advance(config, ScaleState(*(part.reshape(1) for part in state)), found_inf.reshape(1))
    return ScaleState(*(part.reshape(()) for part in batch))


@settings(max_examples=300, deadline=None)
@given(config=CONFIGS, found_infs=FOUND_INFS)
def test_both_give_the_same_bits(config: ScaleConfig, found_infs: list[float]) -> None:
    state = config.start()
    for number in found_infs:
        found_inf = torch.tensor(number)
        assert host_values(*state, found_inf) is not None
        expected = by_tensors(config, state, found_inf)
        state = advance(config, state, found_inf)
        for part, other in zip(state, expected, strict=True):
            assert part.dtype == other.dtype
            assert torch.equal(part, other), (config, number, state, expected)


def test_a_state_in_host_memory_stays_there() -> None:
    config, found_inf = ScaleConfig(), torch.zeros(())
    state = config.start()
    with torch.device("meta"):
        state = advance(config, state, found_inf)
    assert {one.device.type for one in state} == {"cpu"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_reading_host_memory(dtype: torch.dtype) -> None:
    whole = torch.tensor([1, -7, 3], dtype=dtype)
    assert host_values(whole[1]) == [-7]


@pytest.mark.parametrize(
    "scalar",
    [torch.zeros(1), torch.zeros((), device="meta"), torch.zeros((), dtype=torch.bfloat16)],
    ids=["vector", "elsewhere", "another dtype"],
)
def test_what_is_not_a_scalar_in_host_memory(scalar: Tensor) -> None:
    assert host_values(scalar) is None
