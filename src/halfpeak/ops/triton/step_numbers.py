"""Numbers: what the update reads for each count of steps, worked out where the steps are counted.

Not typed strictly: what stands in a kernel is the language of triton, which type checkers do not know.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

NUMBERS = tl.constexpr(12)
"""In a row: what a gradient is multiplied by, up to nine constants of the rule, and the step."""

SEED = tl.constexpr(11)
"""Where the step stands, for forms that round up or down by chance."""


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
def _put(numbers, column: tl.constexpr, value):
    tl.store(numbers + column, value.to(tl.float32))


@triton.jit
def write_numbers(numbers, hyper, multiplier, lr, step, RULE: tl.constexpr):
    """One row: what a gradient is multiplied by, the constants of the rule, and at :data:`SEED` the step.

    The constants are those that ``constants`` of the rules tells a host.

    Args:
        numbers: result.                                     # f32[NUMBERS]
        hyper: sign, lr, weight decay and what the rule has.  # f64[HYPER]
        multiplier: unscales gradients and clips.
        lr: learning rate.                                   # f64
        step: the coming one.                                # i32
    """
    _put(numbers, 0, tl.load(hyper) * multiplier)
    _put(numbers, SEED, step)
    decay = tl.load(hyper + 2)
    first = tl.load(hyper + 3)
    second = tl.load(hyper + 4)
    eps = tl.load(hyper + 5)
    if RULE == "adam":
        corrects = tl.load(hyper + 6) != 0
        decouples = tl.load(hyper + 7) != 0
        start1 = tl.where(corrects, 1.0 - _power(first, step), 1.0)
        start2 = tl.where(corrects, 1.0 - _power(second, step), 1.0)
        _put(numbers, 1, 1.0 - first)
        _put(numbers, 2, second)
        _put(numbers, 3, 1.0 - second)
        _put(numbers, 4, lr / start1)
        _put(numbers, 5, 1.0 / tl.sqrt(start2))
        _put(numbers, 6, eps)
        _put(numbers, 7, tl.where(decouples, 1.0 - lr * decay, decay))
    elif RULE == "sgd":
        _put(numbers, 1, lr)
        _put(numbers, 2, first)
        _put(numbers, 3, tl.where(step > 1, 1.0 - second, 1.0))
        _put(numbers, 4, decay)
    elif RULE == "adagrad":
        _put(numbers, 1, lr / (1.0 + (step - 1).to(tl.float64) * first))
        _put(numbers, 2, eps)
        _put(numbers, 3, decay)
    else:
        # These two differ in the second moment.
        tl.static_assert(RULE == "lamb" or RULE == "novograd", "a rule without constants in write_numbers")
        corrects = tl.load(hyper + 6) != 0
        averages = tl.load(hyper + 7) != 0
        starts = (tl.load(hyper + 8) != 0) & (step <= 1)
        start1 = tl.where(corrects, 1.0 - _power(first, step), 1.0)
        start2 = tl.where(corrects, 1.0 - _power(second, step), 1.0)
        _put(numbers, 1, first)
        _put(numbers, 2, tl.where(averages, 1.0 - first, 1.0))
        _put(numbers, 3, tl.where(starts, 0.0, second))
        _put(numbers, 4, tl.where(starts, 1.0, 1.0 - second))
        _put(numbers, 5, 1.0 / start1)
        _put(numbers, 6, 1.0 / tl.sqrt(start2))
        _put(numbers, 7, eps)
        _put(numbers, 8, decay)
        _put(numbers, 9, lr)
