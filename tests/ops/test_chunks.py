"""Unscaling and accumulating a chunk at a time gives the bits of ``ops/reference.py``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfpeak.ops import foreach, reference

INV_SCALE = torch.tensor(2.0**-3)
SIZES = [foreach.MIN_CHUNKED, foreach.CHUNK, foreach.CHUNK + 1, 3 * foreach.CHUNK - 5]
LOW = [torch.float32, torch.bfloat16, torch.float16]


def drawn(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("size", SIZES)
def test_same_bits_and_flag_as_the_reference(size: int, dtype: torch.dtype, bad: float | None) -> None:
    for position in (0, size // 2, size - 1):
        grad, into = drawn(size, dtype), drawn(size, torch.float32)
        if bad is not None:
            grad[position] = bad
        before, expected, flags = grad.clone(), into.clone(), [torch.zeros(()) for _ in range(4)]
        reference.accumulate_([expected], [grad], INV_SCALE, flags[0])
        assert foreach._accumulate_chunks(into, grad, INV_SCALE, flags[1])
        (fresh,) = reference.unscaled([grad], [torch.float32], INV_SCALE, flags[2])
        other = torch.empty_like(fresh)
        assert foreach._unscale_chunks(other, grad, INV_SCALE, flags[3])
        assert torch.equal(into.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(other.nan_to_num(7.0), fresh.nan_to_num(7.0))
        assert torch.equal(grad.nan_to_num(7.0), before.nan_to_num(7.0))
        assert [bool(flag) for flag in flags] == [bad is not None] * 4


def test_where_new_tensors_go_by_default_does_not_matter() -> None:
    grad, into, flag = (
        drawn(foreach.MIN_CHUNKED, torch.bfloat16),
        torch.zeros(foreach.MIN_CHUNKED),
        torch.zeros(()),
    )
    with torch.device("meta"):
        assert foreach._accumulate_chunks(into, grad, INV_SCALE, flag)
    assert torch.equal(into, grad.float() * INV_SCALE)


def channels_last(size: int) -> Tensor:
    return torch.randn(2, size // 8, 2, 2).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("into", "grad"),
    [
        (torch.zeros(64, 256), torch.ones(256, 64).T),
        (torch.zeros(64, 512)[:, ::2], torch.ones(64, 512)[:, ::2]),
        (torch.zeros(foreach.MIN_CHUNKED - 1), torch.ones(foreach.MIN_CHUNKED - 1)),
        (torch.zeros(2**14, dtype=torch.float64), torch.ones(2**14, dtype=torch.float64)),
    ],
    ids=["another order", "gaps", "small", "float64"],
)
def test_what_is_left_to_lists(into: Tensor, grad: Tensor) -> None:
    before, found_inf = into.clone(), torch.zeros(())
    assert not foreach._accumulate_chunks(into, grad, INV_SCALE, found_inf)
    assert not foreach._unscale_chunks(into, grad, INV_SCALE, found_inf)
    assert torch.equal(into, before)
    foreach.accumulate_([into], [grad], INV_SCALE, found_inf)
    assert torch.equal(into, before + grad / 8)


def test_any_order_of_memory_that_both_share() -> None:
    into, grad = channels_last(2**14), channels_last(2**14)
    expected = into + grad * INV_SCALE
    assert foreach._accumulate_chunks(into, grad, INV_SCALE, torch.zeros(()))
    assert torch.equal(into, expected)


def test_a_scale_below_one_can_overflow_what_is_written() -> None:
    grad, found_inf = torch.full((2**14,), 3e38), torch.zeros(())
    assert not foreach._accumulate_chunks(torch.zeros(2**14), grad, torch.tensor(2.0), found_inf)
    foreach.accumulate_([torch.zeros(2**14)], [grad], torch.tensor(2.0), found_inf)
    assert bool(found_inf)
