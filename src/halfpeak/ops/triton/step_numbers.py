"""Step numbers: the scalars that the update kernel reads for each step count, computed on the device.

Not typed strictly, because type checkers do not know the language of Triton kernels.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

NUMBERS = tl.constexpr(12)
"""Columns of a row: the multiplier of gradients, up to nine constants of the rule, and the step."""

MULTIPLIER = tl.constexpr(0)
"""The column of the multiplier of gradients."""

SEED = tl.constexpr(11)
"""The column of the step, which seeds stochastic rounding."""

# Between them the constants of a rule, in the order of its ``Rule.constants``: a column per name.
ADAM_GAIN1, ADAM_KEEP2, ADAM_GAIN2, ADAM_RATE, ADAM_WIDEN, ADAM_EPS, ADAM_SHRINK = map(
    tl.constexpr, range(1, 8)
)
SGD_RATE, SGD_MOMENTUM, SGD_GAIN, SGD_DECAY = map(tl.constexpr, range(1, 5))
ADAGRAD_RATE, ADAGRAD_EPS, ADAGRAD_DECAY = map(tl.constexpr, range(1, 4))
# Of LAMB and NovoGrad.
LAMB_KEEP1, LAMB_GAIN1, LAMB_KEEP2, LAMB_GAIN2, LAMB_WIDEN1, LAMB_WIDEN2 = map(tl.constexpr, range(1, 7))
LAMB_EPS, LAMB_DECAY, LAMB_RATE = map(tl.constexpr, range(7, 10))

# The columns of a group's row: three of every rule, then those of ``Rule.hyper_params``, and after them zeros.
HYPER_SIGN, HYPER_LR, HYPER_DECAY, HYPER_FIRST, HYPER_SECOND, HYPER_EPS = map(tl.constexpr, range(6))
HYPER_CORRECTS, HYPER_OPTION, HYPER_STARTS = map(tl.constexpr, range(6, 9))
HYPER = tl.constexpr(9)
"""The number of columns of a group's row."""


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
    _put(numbers, MULTIPLIER, tl.load(hyper + HYPER_SIGN) * multiplier)
    _put(numbers, SEED, step)
    decay = tl.load(hyper + HYPER_DECAY)
    first = tl.load(hyper + HYPER_FIRST)
    second = tl.load(hyper + HYPER_SECOND)
    eps = tl.load(hyper + HYPER_EPS)
    if RULE == "adam":
        corrects = tl.load(hyper + HYPER_CORRECTS) != 0
        decouples = tl.load(hyper + HYPER_OPTION) != 0
        start1 = tl.where(corrects, 1.0 - _power(first, step), 1.0)
        start2 = tl.where(corrects, 1.0 - _power(second, step), 1.0)
        _put(numbers, ADAM_GAIN1, 1.0 - first)
        _put(numbers, ADAM_KEEP2, second)
        _put(numbers, ADAM_GAIN2, 1.0 - second)
        _put(numbers, ADAM_RATE, lr / start1)
        _put(numbers, ADAM_WIDEN, 1.0 / tl.sqrt(start2))
        _put(numbers, ADAM_EPS, eps)
        _put(numbers, ADAM_SHRINK, tl.where(decouples, 1.0 - lr * decay, decay))
    elif RULE == "sgd":
        _put(numbers, SGD_RATE, lr)
        _put(numbers, SGD_MOMENTUM, first)
        _put(numbers, SGD_GAIN, tl.where(step > 1, 1.0 - second, 1.0))
        _put(numbers, SGD_DECAY, decay)
    elif RULE == "adagrad":
        _put(numbers, ADAGRAD_RATE, lr / (1.0 + (step - 1).to(tl.float64) * first))
        _put(numbers, ADAGRAD_EPS, eps)
        _put(numbers, ADAGRAD_DECAY, decay)
    else:
        # LAMB and NovoGrad differ in the second moment.
        tl.static_assert(RULE == "lamb" or RULE == "novograd", "a rule without constants in write_numbers")
        corrects = tl.load(hyper + HYPER_CORRECTS) != 0
        averages = tl.load(hyper + HYPER_OPTION) != 0
        starts = (tl.load(hyper + HYPER_STARTS) != 0) & (step <= 1)
        start1 = tl.where(corrects, 1.0 - _power(first, step), 1.0)
        start2 = tl.where(corrects, 1.0 - _power(second, step), 1.0)
        _put(numbers, LAMB_KEEP1, first)
        _put(numbers, LAMB_GAIN1, tl.where(averages, 1.0 - first, 1.0))
        _put(numbers, LAMB_KEEP2, tl.where(starts, 0.0, second))
        _put(numbers, LAMB_GAIN2, tl.where(starts, 1.0, 1.0 - second))
        _put(numbers, LAMB_WIDEN1, 1.0 / start1)
        _put(numbers, LAMB_WIDEN2, 1.0 / tl.sqrt(start2))
        _put(numbers, LAMB_EPS, eps)
        _put(numbers, LAMB_DECAY, decay)
        _put(numbers, LAMB_RATE, lr)
