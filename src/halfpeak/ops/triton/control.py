"""Control: what a host would work out between reading the gradients and moving the weights, in one small program.

Not typed strictly: what stands in a kernel is the language of triton, which type checkers do not know.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _power(base, exponent):
    """``base**exponent`` in float64 for an exponent below 2**31: a float32 would lose most of ``1 - 0.999**t``."""
    result = base * 0.0 + 1.0
    for _ in range(31):
        result = tl.where(exponent % 2 == 1, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result


@triton.jit
def _number(numbers, row, column: tl.constexpr, value):
    tl.store(numbers + row * 8 + column, value.to(tl.float32))


@triton.jit
def _constants(numbers, row, hyper, lr, step, RULE: tl.constexpr):
    """The numbers of the rule for one row; see ``constants`` of the rules, which say the same to the host."""
    decay = tl.load(hyper + 2)
    first = tl.load(hyper + 3)
    second = tl.load(hyper + 4)
    eps = tl.load(hyper + 5)
    if RULE == "adam":
        corrects = tl.load(hyper + 6) != 0
        decouples = tl.load(hyper + 7) != 0
        start1 = tl.where(corrects, 1.0 - _power(first, step), 1.0)
        start2 = tl.where(corrects, 1.0 - _power(second, step), 1.0)
        _number(numbers, row, 1, 1.0 - first)
        _number(numbers, row, 2, second)
        _number(numbers, row, 3, 1.0 - second)
        _number(numbers, row, 4, lr / start1)
        _number(numbers, row, 5, 1.0 / tl.sqrt(start2))
        _number(numbers, row, 6, eps)
        _number(numbers, row, 7, tl.where(decouples, 1.0 - lr * decay, decay))
    elif RULE == "sgd":
        _number(numbers, row, 1, lr)
        _number(numbers, row, 2, first)
        _number(numbers, row, 3, tl.where(step > 1, 1.0 - second, 1.0))
        _number(numbers, row, 4, decay)
    else:
        _number(numbers, row, 1, lr / (1.0 + (step - 1).to(tl.float64) * first))
        _number(numbers, row, 2, eps)
        _number(numbers, row, 3, decay)


@triton.jit(
    do_not_specialize=["partials", "count", "interval", "hysteresis"],
    do_not_specialize_on_alignment=[
        "squares",
        "flags",
        "factor",
        "found_inf",
        "scale",
        "clean",
        "grace",
        "stuck",
        "taken",
        "skipped",
        "rows",
        "hyper",
        "numbers",
        "floats",
        "ints",
    ],
)
def control_kernel(
    squares,
    flags,
    partials,
    factor,
    found_inf,
    scale,
    clean,
    grace,
    stuck,
    taken,
    skipped,
    rows,
    count,
    hyper,
    numbers,
    floats,
    ints,
    limit,
    growth,
    backoff,
    floor,
    ceiling,
    interval,
    hysteresis,
    CLIPS: tl.constexpr,
    KEEPS_BOOKS: tl.constexpr,
    IS_DYNAMIC: tl.constexpr,
    REFILLS_CLEAN: tl.constexpr,
    RULE: tl.constexpr,
    HYPER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finish the reduction; decide; clip; move the loss scale; and work out the numbers that the update reads.

    The transition of the scale is :func:`halfpeak.core.schedule.advance`; the clip is that of
    :class:`halfpeak.ClipNorm`, whose norm is a verdict too if it is infinite.

    Args:
        squares, flags: of each program that measured; ``partials`` of them.  # f32[partials], i32[partials]
        factor: what makes gradients true-sized.                               # f32[]
        found_inf: what is known already: skip on anything but zero.           # f32[]
        scale, clean, grace, stuck: the loss scale.                            # f32[], i32[], ...
        taken, skipped: steps so far.                                          # i32[]
        rows: hyper-parameters, address of the step count, of the learning rate or 0.  # i64[count, 3]
        hyper: sign, lr, weight decay and what the rule has.                   # f64[groups, HYPER]
        numbers: result: what a gradient is multiplied by, the constants.      # f32[count, 8]
        floats: result: found_inf, norm, factor, squares, scale, stuck.        # f32[6]
        ints: result: clean, grace, stuck, taken, skipped.                     # i32[5]
        limit: of the norm, with ``CLIPS``.
        growth, backoff, floor, ceiling, interval, hysteresis: of the scale's configuration.
    """
    at = tl.arange(0, BLOCK)
    known = at < partials
    total = tl.sum(tl.load(squares + at, mask=known, other=0.0))
    overflow = tl.max(tl.load(flags + at, mask=known, other=0)) != 0
    overflow = overflow | (tl.load(found_inf) != 0.0)
    norm = tl.sqrt_rn(total)
    multiplier = tl.load(factor)
    if CLIPS:
        overflow = overflow | ((norm < float("inf")) == 0)
        multiplier = multiplier * tl.minimum(
            tl.div_rn(tl.full([], 1.0, tl.float32), norm + 1e-6) * limit, 1.0
        )
    tl.store(floats, overflow.to(tl.float32))
    tl.store(floats + 1, norm)
    tl.store(floats + 2, multiplier)
    tl.store(floats + 3, total)
    if KEEPS_BOOKS:
        was = tl.load(scale)
        patience = tl.load(stuck)
        spare = tl.load(grace)
        calm = tl.where(overflow, 0, tl.load(clean) + 1)
        if IS_DYNAMIC:
            falls = overflow & (spare - 1 <= 0)
            lowered = tl.maximum(was * backoff, floor)
            grows = (overflow == 0) & (calm >= interval)
            raised = was * growth
            raised = tl.where(tl.abs(raised) < float("inf"), tl.minimum(raised, ceiling), was)
            patience = tl.where(falls & (lowered >= was), patience + 1, tl.where(overflow, patience, 0))
            refills = (overflow == 0) if REFILLS_CLEAN else grows
            spare = tl.where(overflow, spare - 1, tl.where(refills, hysteresis, spare))
            was = tl.where(falls, lowered, tl.where(grows, raised, was))
            calm = tl.where(grows, 0, calm)
        else:
            patience = tl.where(overflow, patience + 1, 0)
        skips = overflow.to(tl.int32)
        tl.store(floats + 4, was)
        tl.store(floats + 5, patience.to(tl.float32))
        tl.store(ints, calm)
        tl.store(ints + 1, spare)
        tl.store(ints + 2, patience)
        tl.store(ints + 3, tl.load(taken) + 1 - skips)
        tl.store(ints + 4, tl.load(skipped) + skips)
    for row in range(count):
        group = hyper + tl.load(rows + row * 3) * HYPER
        step = tl.load(tl.load(rows + row * 3 + 1).to(tl.pointer_type(tl.float32))).to(tl.int32) + 1
        place = tl.load(rows + row * 3 + 2)
        lr = tl.load(group + 1)
        if place != 0:
            lr = tl.load(place.to(tl.pointer_type(tl.float32))).to(tl.float64)
        _number(numbers, row, 0, tl.load(group) * multiplier)
        _constants(numbers, row, group, lr, step, RULE)
