"""The update kernel: unscales gradients, clips, applies a rule and rounds into the model's weights, in one pass.

Not typed strictly, because type checkers do not know the language of Triton kernels.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from halfpeak.ops.triton.codecs import (
    FIRST,
    LOW,
    SECOND,
    THIRD,
    load,
    load_moment,
    load_weight,
    store,
    store_moment,
    store_weight,
    where_of,
)
from halfpeak.ops.triton.measure import pointer
from halfpeak.ops.triton.step_numbers import (
    ADAGRAD_DECAY,
    ADAGRAD_EPS,
    ADAGRAD_RATE,
    ADAM_EPS,
    ADAM_GAIN1,
    ADAM_GAIN2,
    ADAM_KEEP2,
    ADAM_RATE,
    ADAM_SHRINK,
    ADAM_WIDEN,
    LAMB_DECAY,
    LAMB_EPS,
    LAMB_GAIN1,
    LAMB_GAIN2,
    LAMB_KEEP1,
    LAMB_KEEP2,
    LAMB_RATE,
    LAMB_WIDEN1,
    LAMB_WIDEN2,
    MULTIPLIER,
    NUMBERS,
    SEED,
    SGD_DECAY,
    SGD_GAIN,
    SGD_MOMENTUM,
    SGD_RATE,
)


@triton.jit
def _move(
    members,
    grads,
    chunks,
    chunk,
    count,
    numbers,
    each,
    DTYPE: tl.constexpr,
    LOWER: tl.constexpr,
    GRAD: tl.constexpr,
    RULE: tl.constexpr,
    OPTION: tl.constexpr,
    OTHER: tl.constexpr,
    MASTER: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    FULL: tl.constexpr,
):
    """Update one chunk by the arithmetic of the rules in :mod:`halfpeak.fused.rules`, operation by operation."""
    member = tl.load(chunks + 2 * chunk).to(tl.int64)
    own = members + member * COLUMNS
    number = numbers + tl.load(own + 1) * NUMBERS
    where = where_of(tl.load(chunks + 2 * chunk + 1), tl.load(own), CHUNK, BLOCK)
    seed = tl.load(number + SEED).to(tl.int32)
    grad = load(grads + member, 0, GRAD, ALIGN, where, FULL).to(tl.float32) * tl.load(number + MULTIPLIER)
    weight = load_weight(own, DTYPE, MASTER, ALIGN, where, FULL)
    if RULE == "adam":
        # OPTION: decoupled; OTHER: amsgrad.
        shrink = tl.load(number + ADAM_SHRINK)
        if OPTION:
            weight = weight * shrink
        else:
            grad = grad + weight * shrink
        first = load_moment(own, FIRST, A, ALIGN, where, FULL)
        second = load_moment(own, SECOND, B, ALIGN, where, FULL)
        first = first + (grad - first) * tl.load(number + ADAM_GAIN1)
        second = second * tl.load(number + ADAM_KEEP2) + grad * grad * tl.load(number + ADAM_GAIN2)
        largest = second
        if OTHER:
            largest = tl.maximum(load_moment(own, THIRD, C, ALIGN, where, FULL), second)
            store_moment(own, THIRD, C, ALIGN, where, largest, seed, FULL)
        denominator = tl.sqrt_rn(largest) * tl.load(number + ADAM_WIDEN) + tl.load(number + ADAM_EPS)
        weight = weight - tl.load(number + ADAM_RATE) * tl.div_rn(first, denominator)
        store_moment(own, FIRST, A, ALIGN, where, first, seed, FULL)
        store_moment(own, SECOND, B, ALIGN, where, second, seed, FULL)
    elif RULE == "sgd":
        # OPTION: "", "momentum" or "nesterov"; OTHER: weight decay after the momentum.
        decay = tl.load(number + SGD_DECAY)
        if not OTHER:
            grad = grad + weight * decay
        if OPTION != "":
            momentum = tl.load(number + SGD_MOMENTUM)
            buffer = load_moment(own, FIRST, A, ALIGN, where, FULL)
            buffer = buffer * momentum + grad * tl.load(number + SGD_GAIN)
            store_moment(own, FIRST, A, ALIGN, where, buffer, seed, FULL)
            grad = grad + buffer * momentum if OPTION == "nesterov" else buffer
        if OTHER:
            grad = grad + weight * decay
        weight = weight - tl.load(number + SGD_RATE) * grad
    elif RULE == "adagrad":
        # OPTION: decoupled.
        decay = tl.load(number + ADAGRAD_DECAY)
        if not OPTION:
            grad = grad + weight * decay
        total = load_moment(own, FIRST, A, ALIGN, where, FULL)
        total = total + grad * grad
        move = tl.div_rn(grad, tl.sqrt_rn(total) + tl.load(number + ADAGRAD_EPS))
        if OPTION:
            move = move + weight * decay
        weight = weight - tl.load(number + ADAGRAD_RATE) * move
        store_moment(own, FIRST, A, ALIGN, where, total, seed, FULL)
    elif RULE == "lamb":
        # OPTION: decoupled. OTHER: with trust "moments", then "weights", with the learning rate of each parameter in ``each``.
        decay = tl.load(number + LAMB_DECAY)
        first = load_moment(own, FIRST, "identity", ALIGN, where, FULL)
        second = load_moment(own, SECOND, "identity", ALIGN, where, FULL)
        if OTHER != "weights":
            if not OPTION:
                grad = grad + weight * decay
            first = first * tl.load(number + LAMB_KEEP1) + grad * tl.load(number + LAMB_GAIN1)
            second = second * tl.load(number + LAMB_KEEP2) + grad * grad * tl.load(number + LAMB_GAIN2)
            store_moment(own, FIRST, "identity", ALIGN, where, first, seed, FULL)
            store_moment(own, SECOND, "identity", ALIGN, where, second, seed, FULL)
        denominator = tl.sqrt_rn(second) * tl.load(number + LAMB_WIDEN2) + tl.load(number + LAMB_EPS)
        move = tl.div_rn(first * tl.load(number + LAMB_WIDEN1), denominator)
        if OPTION:
            move = move + weight * decay
        if OTHER == "moments":
            _, at, left = where
            # Past the last element there may be 0 / 0.
            move = tl.where(at < left, move, 0.0)
            tl.store(each + chunk, tl.sum(weight * weight))
            tl.store(each + count + chunk, tl.sum(move * move))
        elif OTHER == "weights":
            weight = weight - tl.load(each + member) * move
        else:
            weight = weight - tl.load(number + LAMB_RATE) * move
    else:
        tl.static_assert(RULE == "novograd", "a rule without a formula in update_kernel")
        # norm_kernel has updated the norm. OPTION: the first moment includes the division by the norm and the weight decay.
        norm = tl.load(pointer(own, SECOND, tl.float32, 1))
        divisor = tl.full(grad.shape, 0.0, tl.float32) + (
            norm * tl.load(number + LAMB_WIDEN2) + tl.load(number + LAMB_EPS)
        )
        decay = tl.load(number + LAMB_DECAY)
        first = load_moment(own, FIRST, A, ALIGN, where, FULL)
        if OPTION:
            grad = tl.div_rn(grad, divisor) + weight * decay
        first = first * tl.load(number + LAMB_KEEP1) + grad * tl.load(number + LAMB_GAIN1)
        move = first * tl.load(number + LAMB_WIDEN1)
        if not OPTION:
            move = tl.div_rn(move, divisor) + weight * decay
        weight = weight - tl.load(number + LAMB_RATE) * move
        store_moment(own, FIRST, A, ALIGN, where, first, seed, FULL)
    if OTHER != "moments":
        store_weight(own, DTYPE, MASTER, ALIGN, where, weight, seed, FULL)
        if LOWER is not None:
            store(own, LOW, LOWER, ALIGN, where, weight, FULL)


@triton.jit(
    do_not_specialize=["full", "count", "counters"],
    do_not_specialize_on_alignment=["numbers", "found_inf", "rows", "chunks", "each"],
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
    each,
    DTYPE: tl.constexpr,
    LOWER: tl.constexpr,
    GRAD: tl.constexpr,
    RULE: tl.constexpr,
    OPTION: tl.constexpr,
    OTHER: tl.constexpr,
    MASTER: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Update the weights of a chunk for each program and count the step; do nothing if ``found_inf`` is not zero.

    Args:
        members: the rows of parameters: numel, row of ``numbers``, addresses, chunks.  # i64[members, COLUMNS]
        grads: the addresses of gradients.                               # i64[members]
        chunks: for each chunk the row of its parameter, and its number in it.  # i32[count, 2]
        full: the number of full chunks, which come first.
        count: the number of chunks.
        numbers: the multiplier of gradients, the constants, the step.   # f32[rows, NUMBERS]
        found_inf: anything but 0 skips the step.                        # f32[]
        rows: the addresses of the step counts; this launch increments the first ``counters`` of them.  # i64[rows, 3]
        each: with ``OTHER="moments"`` result: the sums of squares of weights, then of updates.  # f32[2, count]
            With ``OTHER="weights"`` the learning rates.                 # f32[members]
        DTYPE, LOWER, GRAD: dtypes of weights, of the model's low weights (None if it has none), of gradients.
        RULE, OPTION, OTHER: the formula.
        MASTER, A, B, C: bits of the weight's remainder, and the formats of its three state tensors.
        BLOCK: see :func:`halfpeak.ops.triton.codecs.where_of`.
    """
    chunk = tl.program_id(0)
    if tl.load(found_inf) == 0.0:
        for rest in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]  # Triton unrolls it
            if (chunk < full) == (rest == 0):
                _move(
                    members,
                    grads,
                    chunks,
                    chunk,
                    count,
                    numbers,
                    each,
                    DTYPE,
                    LOWER,
                    GRAD,
                    RULE,
                    OPTION,
                    OTHER,
                    MASTER,
                    A,
                    B,
                    C,
                    BLOCK,
                    COLUMNS,
                    CHUNK,
                    ALIGN,
                    rest == 0,
                )
        if chunk == 0:
            for row in range(counters):
                step = tl.load(rows + row * 3 + 1).to(tl.pointer_type(tl.float32))
                tl.store(step, tl.load(step) + 1.0)
