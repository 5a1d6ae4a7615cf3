"""The control kernel: decides a step on the device, between reading the gradients and updating the weights.

Not typed strictly, because type checkers do not know the language of Triton kernels.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from halfpeak.core import rule
from halfpeak.ops.triton.step_numbers import HYPER, HYPER_LR, NUMBERS, write_numbers

rule.tl = tl  # the interpreter looks for the language among the globals of a function
advance = triton.jit(rule.advance)


@triton.jit(
    do_not_specialize=[
        "partials",
        "count",
        "interval",
        "hysteresis",
        "after_growth",
        "after_overflow",
        "after_failure",
    ],
    do_not_specialize_on_alignment=[
        "squares",
        "flags",
        "factor",
        "found_inf",
        "scale",
        "clean",
        "grace",
        "stuck",
        "num_steps",
        "num_skipped",
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
    num_steps,
    num_skipped,
    rows,
    count,
    hyper,
    numbers,
    floats,
    ints,
    max_norm,
    own_max_norm,
    growth,
    backoff,
    floor,
    ceiling,
    interval,
    hysteresis,
    below,
    after_growth,
    after_overflow,
    after_failure,
    JUDGES: tl.constexpr,
    CLIPS: tl.constexpr,
    CLIPS_AGAIN: tl.constexpr,
    DECIDES: tl.constexpr,
    IS_DYNAMIC: tl.constexpr,
    REFILLS_CLEAN: tl.constexpr,
    RECOVERS: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finish the reduction, decide, clip, move the loss scale, and compute the numbers that the update kernel reads.

    The rule of the loss scale is that of :mod:`halfpeak.core.rule`, compiled; the reference of the clip coefficient is
    :func:`halfpeak.core.decide.clip_coef`. With clipping, a norm that is not finite skips the step, too.

    Args:
        squares, flags: results of each program of the measure kernel.         # f32[partials], i32[partials]
        factor: the multiplier that unscales gradients.                        # f32[]
        found_inf: anything but 0 skips the step; 0.5 if the loss itself was not finite.  # f32[]
        scale, clean, grace, stuck: the state of the loss scale.               # f32[], i32[], ...
        num_steps, num_skipped: steps taken and skipped so far.                # i32[]
        rows: for each step count its row of ``hyper``, its address, and the address of the learning rate or 0.  # i64[count, 3]
        hyper: sign, lr, weight decay and the numbers of the rule.             # f64[groups, HYPER]
        numbers: result: the multiplier of gradients, the constants, the step.  # f32[count, NUMBERS]
        floats: result: found_inf, norm, factor, squares, scale.               # f32[5]
        ints: result: clean, grace, stuck, num_steps, num_skipped.             # i32[5]
        max_norm: the limit of the norm, with ``CLIPS``.
        own_max_norm: the rule's own limit of the norm after that clip, with ``CLIPS_AGAIN``.
        growth, backoff, floor, ceiling, interval, hysteresis: see :class:`~halfpeak.core.schedule.ScaleConfig`.
        below, after_growth, after_overflow, after_failure: see :class:`~halfpeak.core.schedule.Recovery`; with ``RECOVERS``.
        JUDGES: whether ``flags`` may skip the step.
    """
    at = tl.arange(0, BLOCK)
    known = at < partials
    total = tl.sum(tl.load(squares + at, mask=known, other=0.0))
    overflow = tl.load(found_inf) != 0.0
    if JUDGES:
        overflow = overflow | (tl.max(tl.load(flags + at, mask=known, other=0)) != 0)
    norm = tl.sqrt_rn(total)
    multiplier = tl.load(factor)
    if CLIPS:
        overflow = overflow | ((norm < float("inf")) == 0)
        clip = tl.minimum(tl.div_rn(tl.full([], 1.0, tl.float32), norm + 1e-6) * max_norm, 1.0)
        multiplier = multiplier * clip
    tl.store(floats, overflow.to(tl.float32))
    tl.store(floats + 1, norm)
    tl.store(floats + 2, multiplier)
    tl.store(floats + 3, total)
    if CLIPS_AGAIN:
        rest = norm * clip if CLIPS else norm
        multiplier = tl.where(rest > own_max_norm, multiplier * tl.div_rn(own_max_norm, rest), multiplier)
    if DECIDES:
        was, calm, spare, patience = tl.load(scale), tl.load(clean), tl.load(grace), tl.load(stuck)
        noted = tl.load(found_inf)
        found = tl.where(noted != 0.0, noted, overflow.to(tl.float32))
        was, calm, spare, patience = advance(
            was, calm, spare, patience, found, was * growth, was * backoff, floor, ceiling, interval, hysteresis,
            below, after_growth, after_overflow, after_failure, IS_DYNAMIC, REFILLS_CLEAN, RECOVERS, tl.where,
        )  # fmt: skip
        skips = overflow.to(tl.int32)
        tl.store(floats + 4, was)
        tl.store(ints, calm)
        tl.store(ints + 1, spare)
        tl.store(ints + 2, patience)
        tl.store(ints + 3, tl.load(num_steps) + 1 - skips)
        tl.store(ints + 4, tl.load(num_skipped) + skips)
    for row in range(count):
        group = hyper + tl.load(rows + row * 3) * HYPER
        step = tl.load(tl.load(rows + row * 3 + 1).to(tl.pointer_type(tl.float32))).to(tl.int32) + 1
        place = tl.load(rows + row * 3 + 2)
        lr = tl.load(group + HYPER_LR)
        if place != 0:
            lr = tl.load(place.to(tl.pointer_type(tl.float32))).to(tl.float64)
        write_numbers(numbers + row * NUMBERS, group, multiplier, lr, step, RULE)
