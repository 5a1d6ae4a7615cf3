"""The two kernels of a step as functions of vectors: measure the gradients, update the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from halfpeak.fused.rules.base import Rule

Update: TypeAlias = Callable[[Tensor, Tensor | None, Sequence[Tensor], Tensor, Tensor], None]
"""``update(weight, low, slots, grad, numbers)`` moves all but the last two in place."""


def measure(grad: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of squares of the true-sized gradients, and whether one is not finite, in one read.

    Args:
        grad: in any dtype, scaled.
        factor: what makes it true-sized; it is applied first, because the square of a scaled gradient may overflow. # f32[]

    Returns:
        ``sum((grad * factor)**2)``, and a flag that stays false where only the sum overflows.  # f32[], bool[]
    """
    true = grad.float() * factor
    return true.square().sum(), torch.isfinite(true).logical_not().any()


def squares(grad: Tensor, factor: Tensor) -> tuple[Tensor]:
    """The first number of :func:`measure`, but for the last elements, ``len(grad) % 4`` of them.

    Four stretches are added up side by side: a compiled sum of one waits for each of its additions before the next, and
    takes three times as long as reading.
    """
    quarter = grad.shape[0] // 4  # len() would be a number of the trace
    a, b, c, d = ((grad[i * quarter : (i + 1) * quarter].float() * factor).square() for i in range(4))
    return (((a + b) + (c + d)).sum(),)


def update_of(rule: Rule) -> Update:
    """The second pass: make true-sized and clip, apply ``rule``, round into the model's weight, for one block."""

    def update(
        weight: Tensor, low: Tensor | None, slots: Sequence[Tensor], grad: Tensor, numbers: Tensor
    ) -> None:
        wide = numbers.dtype
        factor, *constants = numbers.unbind()
        whole, *state = rule.read(weight, slots, wide)
        moved = rule(whole, grad.to(wide) * factor, state, constants)
        store(rule, moved, constants, weight, low, slots)

    return update


def store(
    rule: Rule,
    moved: Sequence[Tensor],
    constants: Sequence[Tensor],
    weight: Tensor,
    low: Tensor | None,
    slots: Sequence[Tensor],
) -> None:
    """Put what ``rule`` has made of a block into its memory."""
    for place, value in zip((weight, *slots), rule.written(moved, constants), strict=True):
        place.copy_(value)
    if low is not None:
        low.copy_(moved[0])


def flat_update_of(rule: Rule, *, has_low: bool) -> Callable[..., tuple[()]]:
    """:func:`update_of` as a function of ``weight, [low,] *slots, grad, numbers``."""
    update = update_of(rule)

    def flat_update(weight: Tensor, *rest: Tensor) -> tuple[()]:
        low, slots = (rest[0], rest[1:-2]) if has_low else (None, rest[:-2])
        update(weight, low, slots, rest[-2], rest[-1])
        return ()

    return flat_update
