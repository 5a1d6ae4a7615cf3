"""The kernel that adds unscaled gradients to float32 sums: one pass over memory, one launch for all tensors.

Not typed strictly, because type checkers do not know the language of Triton kernels.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from halfpeak.ops.triton.measure import pointer


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["table", "factor", "found"],
)
def add_kernel(
    table,
    count,
    factor,
    found,
    GRAD: tl.constexpr,
    ADDS: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """``into = grad * factor``, or ``into += grad * factor``; found is set to 1 if a product is not finite.

    Product and sum are rounded to float32 one after the other. Each program works on one chunk, and looks up its tensor.

    Args:
        table: for each tensor its first chunk, numel, the address of ``into`` and that of ``grad``.  # i64[count, 4]
        count: the number of tensors.
        factor: the multiplier that unscales gradients.  # f32[]
        found: the result.                               # f32[]
        GRAD: dtype of the gradients.
        ADDS: whether ``into`` has an earlier sum.
        STEPS: of the search: ``2**STEPS`` is at least ``count``.
        CHUNK: elements of a chunk.
        ALIGN: elements of which each address is a multiple.
    """
    program = tl.program_id(0)
    member = tl.program_id(0) * 0
    for step in tl.static_range(STEPS):
        further = member + (1 << (STEPS - 1 - step))
        is_there = tl.load(table + further * 4, mask=further < count, other=2**62) <= program
        member = tl.where(is_there, further, member)
    row = table + member * 4
    at = (program - tl.load(row)) * CHUNK + tl.arange(0, CHUNK)
    size = tl.load(row + 1)
    into = pointer(row, 2, tl.float32, ALIGN)
    grad = pointer(row, 3, GRAD, ALIGN)
    scale = tl.load(factor)
    if (program - tl.load(row) + 1) * CHUNK <= size:  # loads without a mask are wide
        true = tl.load(grad + at).to(tl.float32) * scale
        bad = (tl.abs(true) < float("inf")) == 0
        if ADDS:
            true = tl.load(into + at) + true
        tl.store(into + at, true)
    else:
        inside = at < size
        true = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * scale
        bad = (tl.abs(true) < float("inf")) == 0
        if ADDS:
            true = tl.load(into + at, mask=inside, other=0.0) + true
        tl.store(into + at, true, mask=inside)
    if tl.max(bad.to(tl.int32)) != 0:
        tl.store(found, 1.0)  # every program that writes writes the same
