"""Kernels of layer-wise rules: norms of whole parameters, from sums over their chunks in a fixed order.

Not typed strictly, because type checkers do not know the language of Triton kernels.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from halfpeak.ops.triton import columns
from halfpeak.ops.triton.codecs import SECOND
from halfpeak.ops.triton.measure import pointer
from halfpeak.ops.triton.step_numbers import LAMB_GAIN2, LAMB_KEEP2, LAMB_RATE, MULTIPLIER, NUMBERS

CHUNKS = tl.constexpr(columns.CHUNKS)
"""The column of :mod:`halfpeak.ops.triton.columns`, as kernels read it."""


@triton.jit
def _total(each, own, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of ``each`` over the chunks of a parameter, or the largest value."""
    first, count, rest = tl.load(own + CHUNKS), tl.load(own + CHUNKS + 1), tl.load(own + CHUNKS + 2)
    at = tl.arange(0, BLOCK)
    last = tl.load(each + rest, mask=rest >= 0, other=0.0)
    # Compares bits, because the bits of a nan are the largest.
    total = tl.zeros((BLOCK,), tl.int32 if LARGEST else tl.float32)
    for start in range(0, count, BLOCK):
        part = tl.load(each + first + start + at, mask=start + at < count, other=0.0)
        total = tl.maximum(total, part.to(tl.int32, bitcast=True)) if LARGEST else total + part
    if LARGEST:
        return tl.maximum(tl.max(total), last.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    else:
        return tl.sum(total) + last


@triton.jit(
    do_not_specialize=["first"], do_not_specialize_on_alignment=["numbers", "factor", "found_inf", "each"]
)
def norm_kernel(
    members,
    first,
    numbers,
    factor,
    found_inf,
    each,
    LARGEST: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update NovoGrad's running norm in place: one program for each parameter.

    Args:
        members: see :func:`~halfpeak.ops.triton.update.update_kernel`.            # i64[members, COLUMNS]
        first: the row of the first program's parameter.
        numbers: the multiplier of gradients, the constants, the step.             # f32[rows, NUMBERS]
        factor: the multiplier of gradients in the measure kernel.                 # f32[]
        found_inf: anything but 0 leaves the norms as they are.                    # f32[]
        each: see :func:`~halfpeak.ops.triton.measure.measure_kernel`.             # f32[count]
    """
    own = members + (first + tl.program_id(0)) * COLUMNS
    number = numbers + tl.load(own + 1) * NUMBERS
    place = pointer(own, SECOND, tl.float32, 1)
    norm = tl.load(place)
    now = _total(each, own, LARGEST, BLOCK)
    # The gradients may have been clipped since they were measured.
    clip = tl.abs(tl.div_rn(tl.load(number + MULTIPLIER), tl.load(factor)))
    keep, gain = tl.load(number + LAMB_KEEP2), tl.load(number + LAMB_GAIN2)
    if LARGEST:
        norm = norm * keep + now * clip * gain
    else:
        squares = norm * norm * keep + now * clip * clip * gain
        norm = tl.sqrt_rn(squares)
    # An empty parameter has no norm.
    moves = (tl.load(found_inf) == 0.0) & (tl.load(own) > 0)
    tl.store(place, norm, mask=moves)


@triton.jit(do_not_specialize=["first", "count"], do_not_specialize_on_alignment=["numbers", "sums", "rates"])
def lamb_trust_kernel(
    members, first, count, numbers, sums, rates, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """LAMB's learning rate for each parameter: lr * norm of the weight / norm of its update. One program for each.

    Args:
        members, first, numbers: see :func:`norm_kernel`.
        count: the number of chunks.
        sums: the sum of squares in each chunk: of weights, then of updates.  # f32[2, count]
        rates: result.                                                  # f32[members]
    """
    member = first + tl.program_id(0)
    own = members + member * COLUMNS
    number = numbers + tl.load(own + 1) * NUMBERS
    size = tl.sqrt_rn(_total(sums, own, False, BLOCK))
    move = tl.sqrt_rn(_total(sums + count, own, False, BLOCK))
    ratio = tl.where((size != 0.0) & (move != 0.0), tl.div_rn(size, move), 1.0)
    tl.store(rates + member, tl.load(number + LAMB_RATE) * ratio)
