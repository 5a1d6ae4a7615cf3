"""Step numbers: the scalars that the update kernel reads for each step count, computed on the device.

Not typed strictly, because type checkers do not know the language of Triton kernels.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

NUMBERS = tl.constexpr(12)
"""Columns of a row: the multiplier of gradients, up to nine constants of the rule, and the step."""

SEED = tl.constexpr(11)
"""The column of the step, which seeds stochastic rounding."""


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
    """Write one row: the multiplier of gradients, the constants of the rule, and at :data:`SEED` the step.

    The constants are those of ``Rule.constants``, in the same order.

    Args:
        numbers: result.                                     # f32[NUMBERS]
        hyper: sign, lr, weight decay and the numbers of the rule.  # f64[HYPER]
        multiplier: unscales gradients and clips.
        lr: learning rate.                                   # f64
        step: the number of the coming step.                 # i32
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
        # LAMB and NovoGrad differ in the second moment.
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
