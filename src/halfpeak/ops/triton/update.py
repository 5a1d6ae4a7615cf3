"""Update: make gradients true-sized, clip, apply a rule, round into the model's weight, in one pass.

Not typed strictly: what stands in a kernel is the language of triton, which type checkers do not know.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from halfpeak.ops.triton.measure import pointer


@triton.jit
def _load(table, at, DTYPE: tl.constexpr, ALIGN: tl.constexpr, index, size, FULL: tl.constexpr):
    place = pointer(table, at, DTYPE, ALIGN) + index
    if FULL:
        return tl.load(place).to(tl.float32)
    return tl.load(place, mask=index < size, other=0.0).to(tl.float32)


@triton.jit
def _store(
    table,
    at,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    index,
    size,
    value,
    FULL: tl.constexpr,
):
    place = pointer(table, at, DTYPE, ALIGN) + index
    if FULL:
        tl.store(place, value.to(DTYPE))
    else:
        tl.store(place, value.to(DTYPE), mask=index < size)


@triton.jit
def _move(
    members,
    grads,
    chunks,
    chunk,
    numbers,
    WEIGHT: tl.constexpr,
    LOW: tl.constexpr,
    GRAD: tl.constexpr,
    RULE: tl.constexpr,
    OPTION: tl.constexpr,
    OTHER: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    FULL: tl.constexpr,
):
    """One chunk, in the arithmetic of the rules in :mod:`halfpeak.fused.rules`, operation by operation."""
    member = tl.load(chunks + 2 * chunk).to(tl.int64)
    at = tl.load(chunks + 2 * chunk + 1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    own = members + member * COLUMNS
    size = tl.load(own)
    row = numbers + tl.load(own + 6) * 8
    grad = _load(grads, member, GRAD, ALIGN, at, size, FULL) * tl.load(row)
    weight = _load(own, 1, WEIGHT, ALIGN, at, size, FULL)
    if RULE == "adam":
        # OPTION: decoupled; OTHER: amsgrad.
        shrink = tl.load(row + 7)
        if OPTION:
            weight = weight * shrink
        else:
            grad = grad + weight * shrink
        first = _load(own, 3, tl.float32, ALIGN, at, size, FULL)
        second = _load(own, 4, tl.float32, ALIGN, at, size, FULL)
        first = first + (grad - first) * tl.load(row + 1)
        second = second * tl.load(row + 2) + grad * grad * tl.load(row + 3)
        largest = second
        if OTHER:
            largest = tl.maximum(_load(own, 5, tl.float32, ALIGN, at, size, FULL), second)
            _store(own, 5, tl.float32, ALIGN, at, size, largest, FULL)
        denominator = tl.sqrt_rn(largest) * tl.load(row + 5) + tl.load(row + 6)
        weight = weight - tl.load(row + 4) * tl.div_rn(first, denominator)
        _store(own, 3, tl.float32, ALIGN, at, size, first, FULL)
        _store(own, 4, tl.float32, ALIGN, at, size, second, FULL)
    elif RULE == "sgd":
        # OPTION: "", "momentum" or "nesterov"; OTHER: late.
        decay = tl.load(row + 4)
        if not OTHER:
            grad = grad + weight * decay
        if OPTION != "":
            momentum = tl.load(row + 2)
            buffer = _load(own, 3, tl.float32, ALIGN, at, size, FULL)
            buffer = buffer * momentum + grad * tl.load(row + 3)
            _store(own, 3, tl.float32, ALIGN, at, size, buffer, FULL)
            grad = grad + buffer * momentum if OPTION == "nesterov" else buffer
        if OTHER:
            grad = grad + weight * decay
        weight = weight - tl.load(row + 1) * grad
    else:
        # OPTION: decoupled.
        decay = tl.load(row + 3)
        if not OPTION:
            grad = grad + weight * decay
        total = _load(own, 3, tl.float32, ALIGN, at, size, FULL)
        total = total + grad * grad
        move = tl.div_rn(grad, tl.sqrt_rn(total) + tl.load(row + 2))
        if OPTION:
            move = move + weight * decay
        weight = weight - tl.load(row + 1) * move
        _store(own, 3, tl.float32, ALIGN, at, size, total, FULL)
    _store(own, 1, WEIGHT, ALIGN, at, size, weight, FULL)
    if LOW is not None:
        _store(own, 2, LOW, ALIGN, at, size, weight, FULL)


@triton.jit(
    do_not_specialize=["full", "count", "counters"],
    do_not_specialize_on_alignment=["numbers", "found_inf", "rows", "chunks"],
)
def update_kernel(
    members,
    grads,
    chunks,
    full,
    count,
    numbers,
    found_inf,
    rows,
    counters,
    WEIGHT: tl.constexpr,
    LOW: tl.constexpr,
    GRAD: tl.constexpr,
    RULE: tl.constexpr,
    OPTION: tl.constexpr,
    OTHER: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Move every weight once, unless ``found_inf`` is anything but zero; then count the step.

    Args:
        members: numel, addresses of weight, low weight and slots, row.  # i64[members, COLUMNS]
        grads: addresses.                                                # i64[members]
        chunks: member, and which of its chunks.                         # i32[count, 2]
        full: how many chunks their parameter fills; they come first.
        count: how many chunks there are.
        numbers: what a gradient is multiplied by, the constants.        # f32[rows, 8]
        found_inf: skip?                                                 # f32[]
        rows: with the addresses of the step counts; ``counters`` of them are counted here.  # i64[rows, 3]
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    skips = tl.load(found_inf) != 0.0
    full = tl.where(skips, 0, full)
    count = tl.where(skips, 0, count)
    for chunk in range(program, full, programs):
        _move(
            members,
            grads,
            chunks,
            chunk,
            numbers,
            WEIGHT,
            LOW,
            GRAD,
            RULE,
            OPTION,
            OTHER,
            COLUMNS,
            CHUNK,
            ALIGN,
            True,
        )
    for chunk in range(full + program, count, programs):
        _move(
            members,
            grads,
            chunks,
            chunk,
            numbers,
            WEIGHT,
            LOW,
            GRAD,
            RULE,
            OPTION,
            OTHER,
            COLUMNS,
            CHUNK,
            ALIGN,
            False,
        )
    counters = tl.where(skips | (program != 0), 0, counters)
    for row in range(counters):
        step = tl.load(rows + row * 3 + 1).to(tl.pointer_type(tl.float32))
        tl.store(step, tl.load(step) + 1.0)
