"""Exact numerics of every backend: every 16-bit pattern at small to large scales, and a million random float32 values.

The expected value is computed in float64, where the product of a 16-bit or float32 value and a power of two is exact,
and is rounded once. ``found_inf`` must be set exactly when a written value is not finite.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from halfpeak.core.decide import clip_coef, clip_coef_of_number
from halfpeak.ops import foreach, reference

LOW = [torch.float16, torch.bfloat16]
SCALES = [2.0**exponent for exponent in range(-14, 25, 3)]
BACKENDS = [reference, foreach]
LENGTHS = [1, 1025]


def patterns(dtype: torch.dtype) -> Tensor:
    """All 65 536 values of a 16-bit dtype."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def specials() -> Tensor:
    """Float32 values at the edges of the format, and a million random bit patterns."""
    limits = torch.finfo(torch.float32)
    edges = [0.0, -0.0, limits.tiny, -limits.tiny, 2.0**-149, limits.max, -limits.max, 65504.0, 65520.0, 1.0]
    edges += [torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1 / 3, 2.0**127, 2.0**-126 * (1 - 2.0**-23)]
    bits = torch.randint(-(2**31), 2**31, (1_000_000,), dtype=torch.int64).to(torch.int32)
    return torch.cat([torch.tensor(edges), bits.view(torch.float32)])


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether tensors are bitwise equal, except that any nan equals any nan."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    number = ~expected.isnan()
    return torch.equal(actual.isnan(), ~number) and torch.equal(
        actual[number].view(whole), expected[number].view(whole)
    )


def scaled(values: Tensor, inv_scale: float, dtype: torch.dtype) -> Tensor:
    """``values * inv_scale`` in float64, rounded once."""
    return (values.double() * inv_scale).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", LOW)
def test_every_low_pattern(dtype: torch.dtype, scale: float, backend: ModuleType) -> None:
    values, inv_scale = patterns(dtype), torch.tensor(1 / scale)
    there = torch.linspace(-1, 1, len(values))
    expected_low = scaled(values, 1 / scale, dtype)
    expected_high = scaled(values, 1 / scale, torch.float32)

    in_place, found_inf = values.clone(), torch.zeros(())
    backend.unscale_([in_place], inv_scale, found_inf)
    assert same(in_place, expected_low)
    assert found_inf == 1

    (high,) = backend.unscaled([values], [torch.float32], inv_scale, found_inf)
    (low,) = backend.unscaled([values], [dtype], inv_scale, found_inf)
    assert same(high, expected_high)
    assert same(low, expected_low)

    into = there.clone()
    backend.accumulate_([into], [values], inv_scale, found_inf)
    assert same(into, there + expected_high)


@pytest.mark.parametrize("inv_scale", [1 / 3, 0.1, 1e-7, 1 / 65535, 1.7])
@pytest.mark.parametrize("dtype", LOW)
def test_other_factors_round_in_float32_first(dtype: torch.dtype, inv_scale: float) -> None:
    values, factor = patterns(dtype), torch.tensor(inv_scale)
    expected = (values.float() * factor).to(dtype)
    for backend in BACKENDS:
        in_place, found_inf = values.clone(), torch.zeros(())
        backend.unscale_([in_place], factor, found_inf)
        assert same(in_place, expected)
        (high,) = backend.unscaled([values], [torch.float32], factor, found_inf)
        assert same(high, values.float() * factor)


def placed(values: Tensor, length: int) -> Tensor:
    """Rows of ones with each value first, last, and where a vectorised loop's tail begins.  # [3 * values, length]"""
    rows = torch.ones(3 * len(values), length, dtype=values.dtype)
    for row, position in enumerate((0, length - 1, length // 8 * 8)):
        rows[row * len(values) : (row + 1) * len(values), min(position, length - 1)] = values
    return rows


def telling(dtype: torch.dtype) -> Tensor:
    """Patterns that are not finite, or at least half as large as the largest finite value."""
    values = patterns(dtype)
    return values[~values.isfinite() | (values.abs() >= torch.finfo(dtype).max / 2)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scale", [2.0**-14, 1.0, 2.0**16])
@pytest.mark.parametrize("dtype", LOW)
def test_nothing_is_missed_and_nothing_invented(
    dtype: torch.dtype, scale: float, length: int, backend: ModuleType
) -> None:
    """Calls the backend with one tensor at a time, so that one found_inf cannot hide an error in another."""
    values = telling(dtype) if scale == 1 else telling(dtype)[::16]
    rows, inv_scale = placed(values, length), torch.tensor(1 / scale)
    low, high = scaled(rows, 1 / scale, dtype), scaled(rows, 1 / scale, torch.float32)
    expected = [(~written.isfinite()).any(dim=1) for written in (rows, low, high, high)]
    assert all(found_infs.any() for found_infs in expected)
    flags = torch.zeros(4, len(rows))
    for row, of_row in zip(rows, flags.T, strict=True):
        checked, unscaled, fresh, summed = of_row
        backend.check_([row], checked)
        backend.unscaled([row], [torch.float32], inv_scale, fresh)
        backend.accumulate_([torch.zeros(length)], [row], inv_scale, summed)
        backend.unscale_([row], inv_scale, unscaled)
    assert torch.equal(flags, torch.stack(expected).float())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [2.0**-14, 1.0, 2.0**16, 2.0**24])
def test_a_million_float32_values(scale: float, backend: ModuleType) -> None:
    values, inv_scale = specials(), torch.tensor(1 / scale)
    expected = scaled(values, 1 / scale, torch.float32)
    in_place, found_inf = values.clone(), torch.zeros(())
    backend.unscale_([in_place], inv_scale, found_inf)
    assert same(in_place, expected)
    assert found_inf == 1

    kept = values[expected.isfinite()]
    found_inf = torch.zeros(())
    backend.unscaled([kept], [torch.float32], inv_scale, found_inf)
    into = torch.ones_like(kept)
    backend.accumulate_([into], [kept], inv_scale, found_inf)
    assert same(into, 1 + expected[expected.isfinite()])
    backend.check_([kept], found_inf)
    assert found_inf == 0


def test_only_what_is_written_counts() -> None:
    """Sums, of elements or with earlier gradients, are left to the next check; a product that fits the master is finite."""
    for backend in BACKENDS:
        into, found_inf = torch.tensor([3e38]), torch.zeros(())
        backend.check_([torch.tensor([3e38, 3e38]), torch.tensor([-3e38, -3e38])], found_inf)
        backend.accumulate_([into], [torch.tensor([3e38])], torch.ones(()), found_inf)
        assert into.isinf()
        assert found_inf == 0
        low = torch.tensor([60000.0], dtype=torch.float16)
        (fresh,) = backend.unscaled([low], [torch.float32], torch.tensor(8.0), found_inf)
        assert fresh.item() == 480000.0
        assert found_inf == 0
        backend.unscale_([low], torch.tensor(8.0), found_inf)
        assert low.isinf()
        assert found_inf == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", LOW)
def test_rounding_is_to_nearest_ties_to_even(dtype: torch.dtype, backend: ModuleType) -> None:
    """Rounds every representable value, every midpoint of neighbours, and the float32 on either side of it."""
    values = patterns(dtype)
    values = values[values.isfinite()].double().abs().unique()  # ascending
    midpoints = (values[:-1] + values[1:]) / 2
    exact = midpoints.float().double() == midpoints
    assert exact.all()
    above = torch.nextafter(midpoints.float(), torch.tensor(torch.inf))
    below = torch.nextafter(midpoints.float(), torch.tensor(-torch.inf))
    # Neighbours differ in the last bit of their patterns; it is 0 in the even one.
    is_even = values.to(dtype).view(torch.int16) % 2 == 0
    ties = torch.where(is_even[:-1], values[:-1], values[1:])
    for source, expected in ((values, values), (midpoints, ties), (above, values[1:]), (below, values[:-1])):
        for sign in (1, -1):
            target = torch.empty(len(source), dtype=dtype)
            backend.copy_cast_([target], [source.float() * sign])
            assert same(target, (expected * sign).to(dtype))


@pytest.mark.parametrize("limit", [1e-30, 0.1, 1.0, 35.0, 1e30, float("inf")])
def test_a_clip_coefficient_in_numbers_is_that_of_tensors(limit: float) -> None:
    patterns = torch.randint(0, 2**31, (5000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    norms = torch.cat([patterns.view(torch.float32), torch.tensor([0.0, 1e-6, limit, float("inf")])])
    numbers = [clip_coef_of_number(norm, limit) for norm in norms.tolist()]
    tensors = torch.stack([clip_coef(norm, limit) for norm in norms])
    assert torch.equal(torch.tensor(numbers).nan_to_num(nan=-1), tensors.nan_to_num(nan=-1))
