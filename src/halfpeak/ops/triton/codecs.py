"""Codecs: how the update kernel loads and stores weights and moments; see :mod:`halfpeak.fused.state_dtypes.codecs`.

Not typed strictly, because type checkers do not know the language of Triton kernels.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from halfpeak.ops.triton import columns
from halfpeak.ops.triton.measure import pointer

WEIGHT = tl.constexpr(columns.WEIGHT)
"""The columns of :mod:`halfpeak.ops.triton.columns`, as kernels read them."""
LOW = tl.constexpr(columns.LOW)
REST = tl.constexpr(columns.REST)
FIRST, SECOND, THIRD = (tl.constexpr(column) for column in columns.STATES)

_SMALLEST = tl.constexpr(2.0**-126)


@triton.jit
def where_of(chunk, size, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The elements of a parameter's chunk: the index of the first, the offsets of all from it, and how many exist.

    Args:
        BLOCK: neighbouring elements that share a scale in 8-bit formats: at most 128, which one warp holds, so that it finds
            their largest value alone.

    Returns:
        i64, i32[CHUNK / BLOCK, BLOCK], i32
    """
    start = chunk.to(tl.int64) * CHUNK
    at = tl.arange(0, CHUNK // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return start, at, tl.minimum(size - start, CHUNK).to(tl.int32)


@triton.jit
def load(own, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, where, FULL: tl.constexpr):
    """Load a chunk of the tensor whose address is ``own[COLUMN]``, with zeros past its end."""
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
    """Store a chunk of the tensor whose address is ``own[COLUMN]``."""
    start, at, left = where
    place = pointer(own, COLUMN, DTYPE, ALIGN) + start + at
    if FULL:
        tl.store(place, value.to(DTYPE))
    else:
        tl.store(place, value.to(DTYPE), mask=at < left)


@triton.jit
def _scales(own, COLUMN: tl.constexpr, where):
    """Pointers to the scales of a chunk's blocks, and which of the blocks exist.  # [CHUNK / BLOCK, 1]"""
    start, at, left = where
    block = tl.arange(0, at.shape[0])[:, None]
    return pointer(own, COLUMN, tl.float32, 1) + start // at.shape[1] + block, block * at.shape[1] < left


@triton.jit
def _hash_bits(bits, seed):
    """See :func:`halfpeak.fused.state_dtypes.codecs.hash_bits`. The products wrap around on purpose."""
    mixed = bits ^ tl.mul(seed, -1640531527, sanitize_overflow=False)
    mixed = tl.mul(mixed, -2048144789, sanitize_overflow=False)
    mixed = tl.mul(mixed ^ ((mixed >> 13) & 0x7FFFF), -1028477387, sanitize_overflow=False)
    return (mixed >> 16) & 0xFFFF


@triton.jit
def _split_float16(value, noise, SIZE: tl.constexpr):
    """See :func:`halfpeak.fused.state_dtypes.codecs.Remainder`.  # i32, i32"""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (tl.minimum(magnitude, 0x47800000) - 0x38000000) << 2
    # Rounds to nearest, ties to even, because a float32 near 2**23 has no fractional bits; a larger one has none itself.
    small = tl.minimum(tl.abs(value), 2.0**-14) * (2.0**39)
    small = tl.where(small < 8388608.0, (small + 8388608.0) - 8388608.0, small)
    count = tl.where(magnitude < 0x38800000, small.to(tl.int32), normal)
    digits: tl.constexpr = SIZE - 1
    half: tl.constexpr = 1 << (SIZE - 2)
    count = tl.minimum((count + noise) >> (16 - SIZE), (0x7BFF << digits) + half - 1)
    low = (count + half - 1 + ((count >> digits) & 1)) >> digits
    rest = tl.where(magnitude < 0x7F800000, count - (low << digits), 0)
    low = tl.where(magnitude < 0x7F800000, low, tl.where(magnitude == 0x7F800000, 0x7C00, 0x7E00))
    return low | ((bits >> 16) & 0x8000), rest


@triton.jit
def _join_float16(low, rest):
    """The inverse of :func:`_split_float16`, with a rest of 15 digits.  # f32"""
    count = ((low & 0x7FFF) << 15) + rest
    normal = ((count >> 2) + 0x38000000).to(tl.float32, bitcast=True)
    value = tl.where(count < 33554432, count.to(tl.float32) * (2.0**-39), normal)
    value = tl.where(low < 0, -value, value)
    as_it_is = low.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where((low & 0x7C00) == 0x7C00, as_it_is, value)


@triton.jit
def load_weight(
    own, DTYPE: tl.constexpr, MASTER: tl.constexpr, ALIGN: tl.constexpr, where, FULL: tl.constexpr
):
    """Load a chunk of a weight as float32. ``MASTER``: the number of bits of its remainder, 0 if it has none."""
    if MASTER == 0:
        return load(own, WEIGHT, DTYPE, ALIGN, where, FULL).to(tl.float32)
    else:
        low = load(own, WEIGHT, tl.int16, ALIGN, where, FULL).to(tl.int32)
        rest = load(own, REST, tl.int16 if MASTER == 16 else tl.int8, ALIGN, where, FULL).to(tl.int32)
        # Nothing rounds up to zero: other code wrote a zero whose remainder is negative.
        rest = tl.where(((low & 0x7FFF) == 0) & (rest < 0), 0, rest) << (16 - MASTER)
        if tl.float16 == DTYPE:
            return _join_float16(low, rest)
        else:
            return (((low - (rest < 0).to(tl.int32)) << 16) | (rest & 0xFFFF)).to(tl.float32, bitcast=True)


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
    """Store a chunk of a weight, and the remainder of its rounding."""
    if MASTER == 0:
        store(own, WEIGHT, DTYPE, ALIGN, where, value, FULL)
    else:
        noise = _hash_bits(value.to(tl.int32, bitcast=True), seed) >> 8 if MASTER == 8 else 0
        if tl.float16 == DTYPE:
            low, rest = _split_float16(value, noise, MASTER)
        else:
            bits = tl.add(value.to(tl.int32, bitcast=True), noise, sanitize_overflow=False)
            # The bits of some nans would round up to a zero.
            bits = tl.where(value != value, 0x7FC00000, bits)
            rest = (bits << 16) >> (32 - MASTER)
            low = (bits >> 16) + (rest < 0).to(tl.int32)
        store(own, WEIGHT, tl.int16, ALIGN, where, low, FULL)
        store(own, REST, tl.int16 if MASTER == 16 else tl.int8, ALIGN, where, rest, FULL)


@triton.jit
def load_moment(
    own, COLUMN: tl.constexpr, FORMAT: tl.constexpr, ALIGN: tl.constexpr, where, FULL: tl.constexpr
):
    """Load a chunk of a moment as float32.

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
    """Store a chunk of a moment; see :func:`load_moment`."""
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
        # Without the sign, the bits of floats are in the order of their values, and a nan is the largest.
        bits = tl.max(root.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)
        scale = bits.to(tl.float32, bitcast=True) * (1 / 127 if FORMAT == "int8_block" else 1 / 255)
        scale = tl.where(scale < _SMALLEST, _SMALLEST, scale)
        scales, exists = _scales(own, COLUMN + 1, where)
        tl.store(scales, scale, mask=exists)
        steps = tl.div_rn(root, tl.broadcast_to(scale, root.shape))
        if FORMAT == "int8_block":
            # Rounds to nearest, ties to even, because a float32 near 1.5 * 2**23 has no fractional bits.
            steps = (steps + 12582912.0) - 12582912.0
            store(own, COLUMN, tl.int8, ALIGN, where, steps.to(tl.int32), FULL)
        else:
            up = _hash_bits(value.to(tl.int32, bitcast=True), seed).to(tl.float32) * (2.0**-16)
            steps = tl.minimum(tl.floor(steps + up), 255.0)
            steps = tl.where(value > 0, tl.maximum(steps, 1.0), steps)
            store(own, COLUMN, tl.uint8, ALIGN, where, steps.to(tl.int32), FULL)
