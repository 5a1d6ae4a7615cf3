"""The measure kernel: reads all gradients once, where autograd left them; each program gives a sum of squares and a flag.

Not typed strictly, because type checkers do not know the language of Triton kernels.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pointer(table, at, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """The address in ``table[at]`` as a pointer. It is a multiple of ``ALIGN`` elements, which makes loads through it wide."""
    place = tl.load(table + at).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(place, ALIGN * DTYPE.primitive_bitwidth // 8)


@triton.jit
def largest(value):
    """The largest absolute value, or nan if there is one: without the sign, the bits of floats are in the order of values."""
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits).to(tl.float32, bitcast=True)


@triton.jit
def _read(
    total,
    bad,
    members,
    grads,
    chunks,
    chunk,
    factor,
    each,
    GRAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    EACH: tl.constexpr,
    FULL: tl.constexpr,
):
    member = tl.load(chunks + 2 * chunk).to(tl.int64)
    at = tl.load(chunks + 2 * chunk + 1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    grad = pointer(grads, member, GRAD, ALIGN)
    if FULL:
        true = tl.load(grad + at).to(tl.float32) * factor
    else:
        size = tl.load(members + member * COLUMNS)
        true = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32) * factor
    if EACH == "squares":
        tl.store(each + chunk, tl.sum(true * true))
    elif EACH == "largest":
        tl.store(each + chunk, largest(true))
    return total + true * true, bad | ((tl.abs(true) < float("inf")).to(tl.int32) ^ 1)


@triton.jit(
    do_not_specialize=["full", "count"],
    do_not_specialize_on_alignment=["factor", "squares", "flags", "each", "chunks"],
)
def measure_kernel(
    members,
    grads,
    chunks,
    full,
    count,
    factor,
    squares,
    flags,
    each,
    GRAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    EACH: tl.constexpr,
):
    """``squares[program] = sum((grad * factor)**2)`` over its chunks, ``flags[program] = 1`` if an element is not finite.

    Gradients are unscaled before they are squared, because the square of a scaled gradient may overflow. Full chunks come
    first, because loads without a mask are wide. Every program sums its chunks in the same order in every run.

    Args:
        members: the rows of parameters; the first column is numel.  # i64[members, COLUMNS]
        grads: the addresses of gradients.  # i64[members]
        chunks: for each chunk the row of its parameter, and its number in it.  # i32[count, 2]
        full: the number of full chunks.
        count: the number of chunks.
        factor: the multiplier that unscales gradients.  # f32[]
        squares: the result.   # f32[programs]
        flags: the result.     # i32[programs]
        each: result for layer-wise rules: of every chunk what ``EACH`` names, ``squares`` or ``largest``.  # f32[count]
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    scale = tl.load(factor)
    total = tl.zeros((CHUNK,), tl.float32)
    bad = tl.zeros((CHUNK,), tl.int32)
    # Unrolled, so that the loads of four chunks do not wait for one another.
    for chunk in tl.range(program, full, programs, loop_unroll_factor=4):
        total, bad = _read(
            total, bad, members, grads, chunks, chunk, scale, each, GRAD, COLUMNS, CHUNK, ALIGN, EACH, True
        )
    for chunk in range(full + program, count, programs):
        total, bad = _read(
            total, bad, members, grads, chunks, chunk, scale, each, GRAD, COLUMNS, CHUNK, ALIGN, EACH, False
        )
    tl.store(squares + program, tl.sum(total))
    tl.store(flags + program, tl.max(bad))
