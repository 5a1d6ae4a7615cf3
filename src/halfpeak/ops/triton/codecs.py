"""Codecs: how weights and moments are read and written within the update, as :mod:`halfpeak.fused.state_dtypes.codecs` says.

Not typed strictly: what stands in a kernel is the language of triton, which type checkers do not know.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from halfpeak.ops.triton.measure import pointer

LOW = tl.constexpr(3)
"""Columns of a member's row: weight, the model's low weight, the remainder; then three slots, each beside its scales."""
WEIGHT = tl.constexpr(2)
REST = tl.constexpr(4)
FIRST = tl.constexpr(5)
SECOND = tl.constexpr(7)
THIRD = tl.constexpr(9)

ROW = tl.constexpr(128)
"""Neighbours that share a scale in 8 bits: what a warp holds side by side, so that none need be asked for their largest."""

_SMALLEST = tl.constexpr(2.0**-126)


@triton.jit
def where_of(chunk, size, CHUNK: tl.constexpr):
    """Where the elements of a parameter's chunk are: its first one, the others beside it, how many there are.

    Returns:
        i64, i32[CHUNK / ROW, ROW], i32
    """
    start = chunk.to(tl.int64) * CHUNK
    at = tl.arange(0, CHUNK // ROW)[:, None] * ROW + tl.arange(0, ROW)[None, :]
    return start, at, tl.minimum(size - start, CHUNK).to(tl.int32)


@triton.jit
def load(own, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, where, FULL: tl.constexpr):
    """Elements of the tensor whose address is ``own[COLUMN]``, and zeros beside it."""
    start, at, left = where
    place = pointer(own, COLUMN, DTYPE, ALIGN) + start + at
    if FULL:
        return tl.load(place)
    else:
        return tl.load(place, mask=at < left, other=0)


@triton.jit
def store(
    own, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, where, value, FULL: tl.constexpr
):
    """Write elements of the tensor whose address is ``own[COLUMN]``."""
    start, at, left = where
    place = pointer(own, COLUMN, DTYPE, ALIGN) + start + at
    if FULL:
        tl.store(place, value.to(DTYPE))
    else:
        tl.store(place, value.to(DTYPE), mask=at < left)


@triton.jit
def _scales(own, COLUMN: tl.constexpr, where):
    """Where the scales of a chunk's rows are, and which rows there are.  # [CHUNK / ROW, 1]"""
    start, at, left = where
    row = tl.arange(0, at.shape[0])[:, None]
    return pointer(own, COLUMN, tl.float32, 1) + start // ROW + row, row * ROW < left


@triton.jit
def _hash_bits(bits, seed):
    """See :func:`halfpeak.fused.state_dtypes.codecs.hash_bits`. Its products are meant to wrap around."""
    mixed = bits ^ tl.mul(seed, -1640531527, sanitize_overflow=False)
    mixed = tl.mul(mixed, -2048144789, sanitize_overflow=False)
    mixed = tl.mul(mixed ^ ((mixed >> 13) & 0x7FFFF), -1028477387, sanitize_overflow=False)
    return (mixed >> 16) & 0xFFFF


@triton.jit
def load_weight(
    own, DTYPE: tl.constexpr, MASTER: tl.constexpr, ALIGN: tl.constexpr, where, FULL: tl.constexpr
):
    """A weight as float32. ``MASTER``: the bits of its remainder, 0 where it has none."""
    if MASTER == 0:
        return load(own, WEIGHT, DTYPE, ALIGN, where, FULL).to(tl.float32)
    else:
        low = load(own, WEIGHT, tl.int16, ALIGN, where, FULL).to(tl.int32)
        rest = load(own, REST, tl.int16 if MASTER == 16 else tl.int8, ALIGN, where, FULL).to(tl.int32)
        # Nothing rounds up to a zero: one less would be a nan.
        rest = tl.where(((low & 0x7FFF) == 0) & (rest < 0), 0, rest)
        tail = (rest << (16 - MASTER)) & 0xFFFF
        return (((low - (rest < 0).to(tl.int32)) << 16) | tail).to(tl.float32, bitcast=True)


@triton.jit
def store_weight(
    own,
    DTYPE: tl.constexpr,
    MASTER: tl.constexpr,
    ALIGN: tl.constexpr,
    where,
    value,
    seed,
    FULL: tl.constexpr,
):
    """Write a weight, and what it has rounded away."""
    if MASTER == 0:
        store(own, WEIGHT, DTYPE, ALIGN, where, value, FULL)
    else:
        bits = value.to(tl.int32, bitcast=True)
        if MASTER == 8:
            bits = tl.add(bits, _hash_bits(bits, seed) >> 8, sanitize_overflow=False)
        # The payload of a nan could round up to a zero.
        bits = tl.where(value != value, 0x7FC00000, bits)
        rest = (bits << 16) >> (32 - MASTER)
        low = (bits >> 16) + (rest < 0).to(tl.int32)
        store(own, WEIGHT, tl.int16, ALIGN, where, low, FULL)
        store(own, REST, tl.int16 if MASTER == 16 else tl.int8, ALIGN, where, rest, FULL)


@triton.jit
def load_moment(
    own, COLUMN: tl.constexpr, FORMAT: tl.constexpr, ALIGN: tl.constexpr, where, FULL: tl.constexpr
):
    """A moment as float32.

    Args:
        FORMAT: ``identity``, ``bf16``, ``bf16_stochastic``, ``int8_block`` or ``uint8_sqrt_block``.
        where: see :func:`where_of`.
    """
    if FORMAT == "identity":
        return load(own, COLUMN, tl.float32, ALIGN, where, FULL)
    elif FORMAT == "bf16" or FORMAT == "bf16_stochastic":
        return load(own, COLUMN, tl.bfloat16, ALIGN, where, FULL).to(tl.float32)
    else:
        steps = load(own, COLUMN, tl.int8 if FORMAT == "int8_block" else tl.uint8, ALIGN, where, FULL)
        scales, exists = _scales(own, COLUMN + 1, where)
        value = steps.to(tl.float32) * tl.load(scales, mask=exists, other=0.0)
        return value if FORMAT == "int8_block" else value * value


@triton.jit
def store_moment(
    own,
    COLUMN: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGN: tl.constexpr,
    where,
    value,
    seed,
    FULL: tl.constexpr,
):
    """Write a moment; see :func:`load_moment`."""
    if FORMAT == "identity":
        store(own, COLUMN, tl.float32, ALIGN, where, value, FULL)
    elif FORMAT == "bf16":
        store(own, COLUMN, tl.bfloat16, ALIGN, where, value, FULL)
    elif FORMAT == "bf16_stochastic":
        bits = value.to(tl.int32, bitcast=True)
        bits = tl.add(bits, _hash_bits(bits, seed), sanitize_overflow=False)
        store(own, COLUMN, tl.int16, ALIGN, where, bits >> 16, FULL)
    else:
        root = value if FORMAT == "int8_block" else tl.sqrt_rn(value)
        # The bits of floats without their sign are in the order of the floats, and a nan is the largest.
        bits = tl.max(root.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)
        scale = bits.to(tl.float32, bitcast=True) * (1 / 127 if FORMAT == "int8_block" else 1 / 255)
        scale = tl.where(scale < _SMALLEST, _SMALLEST, scale)
        scales, exists = _scales(own, COLUMN + 1, where)
        tl.store(scales, scale, mask=exists)
        steps = tl.div_rn(root, tl.broadcast_to(scale, root.shape))
        if FORMAT == "int8_block":
            # To the nearest, halves to the even: beside 1.5 * 2**23 a float32 has no digits behind the point.
            steps = (steps + 12582912.0) - 12582912.0
            store(own, COLUMN, tl.int8, ALIGN, where, steps.to(tl.int32), FULL)
        else:
            up = _hash_bits(value.to(tl.int32, bitcast=True), seed).to(tl.float32) * (2.0**-16)
            steps = tl.minimum(tl.floor(steps + up), 255.0)
            steps = tl.where(value > 0, tl.maximum(steps, 1.0), steps)
            store(own, COLUMN, tl.uint8, ALIGN, where, steps.to(tl.int32), FULL)
