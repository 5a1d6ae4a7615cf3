"""The decider as one kernel: the step of any optimizer on an accelerator, in one launch in the place of sixty operations.

Not typed strictly, because type checkers do not know the language of Triton kernels.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from halfpeak.core import rule

rule.tl = tl  # the interpreter looks for the language among the globals of a function
advance, found_of_loss, moves = map(triton.jit, (rule.advance, rule.found_of_loss, rule.moves))


@triton.jit(
    do_not_specialize=["max_norm"],
    do_not_specialize_on_alignment=["found", "norm", "num_steps", "num_skipped", "floats", "ints"],
)
def decide_kernel(
    found,
    norm,
    max_norm,
    states,
    noted,
    firsts,
    factors,
    numbers,
    num_steps,
    num_skipped,
    floats,
    ints,
    OWNED: tl.constexpr,
    COUNTS: tl.constexpr,
    SWITCHES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CLIPS: tl.constexpr,
):
    """See :func:`halfpeak.core.decide.decide`, whose results in tensors this one gives bit for bit. All scalars are pointers.

    Args:
        found: not 0 if a gradient is not finite.           # f32[]
        norm: of all gradients, with ``HAS_NORM``.          # f32[]
        max_norm: the largest norm, with ``CLIPS``.
        states: scale, clean, grace and stuck of each loss. # f32[], i32[], i32[], i32[], ...
        noted: what the passes of each loss have found.     # f32[], ...
        firsts: the scale in the first of them.             # f32[], ...
        factors: growth and backoff of each loss.
        numbers: ``numbers_of`` each loss.
        num_steps: steps taken so far.                      # i32[]
        num_skipped: steps skipped so far.                  # i32[]
        floats: result: 1 to skip, coefficient, then the scale of each loss.                    # f32[2 + losses]
        ints: result: steps taken and skipped, then clean, grace and stuck of each loss.        # i32[2 + 3 * losses]
        OWNED: of each loss.
        COUNTS: of each loss.
        SWITCHES: ``switches_of`` each loss.
    """
    skip = tl.load(found) != 0
    explained = tl.full([], 0.0, tl.float32)
    for k in tl.static_range(len(OWNED)):
        explained = tl.maximum(explained, tl.load(noted[k]))
    skip = skip | (explained > 0)
    coef = tl.full([], 1.0, tl.float32)
    if HAS_NORM:
        size = tl.load(norm)
        skip = skip | ((tl.abs(size) < float("inf")) == 0)
        if CLIPS:
            coef = tl.div_rn(tl.full([], 1.0, tl.float32), size + 1e-6) * max_norm
            coef = tl.where(coef < 1, coef, 1.0)
    tl.store(floats, skip.to(tl.float32))
    tl.store(floats + 1, coef)
    tl.store(ints, tl.load(num_steps) + tl.where(skip, 0, 1))
    tl.store(ints + 1, tl.load(num_skipped) + tl.where(skip, 1, 0))
    for k in tl.static_range(len(OWNED)):
        scale, clean = tl.load(states[4 * k]), tl.load(states[4 * k + 1])
        grace, stuck = tl.load(states[4 * k + 2]), tl.load(states[4 * k + 3])
        mine = tl.load(noted[k])
        told = found_of_loss(skip, explained, tl.maximum(mine, 0.0), OWNED[k], tl.where)
        s, c, g, t = advance(
            scale, clean, grace, stuck, told, scale * factors[2 * k], scale * factors[2 * k + 1],
            numbers[8 * k], numbers[8 * k + 1], numbers[8 * k + 2], numbers[8 * k + 3],
            numbers[8 * k + 4], numbers[8 * k + 5], numbers[8 * k + 6], numbers[8 * k + 7],
            SWITCHES[3 * k], SWITCHES[3 * k + 1], SWITCHES[3 * k + 2], tl.where,
        )  # fmt: skip
        move = moves(told, scale, tl.load(firsts[k]), COUNTS[k]) & (mine >= 0)
        tl.store(floats + 2 + k, tl.where(move, s, scale))
        tl.store(ints + 2 + 3 * k, tl.where(move, c, clean))
        tl.store(ints + 3 + 3 * k, tl.where(move, g, grace))
        tl.store(ints + 4 + 3 * k, tl.where(move, t, stuck))
