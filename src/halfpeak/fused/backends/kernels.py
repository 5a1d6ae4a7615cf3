"""The two kernels of a step as functions of vectors: measure the gradients, update the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from halfpeak.fused.rules.base import Rule


def measure(grad: Tensor, multiplier: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of squares of the unscaled gradients, and whether a gradient is not finite, in one read.

    Args:
        grad: scaled gradients in any dtype.
        multiplier: unscales; applied before squaring, because the square of a scaled gradient may overflow.  # f32[]

    Returns:
        ``sum((grad * multiplier)**2)``, and a flag that stays false if only the sum overflows.  # f32[], bool[]
    """
    unscaled = grad.float() * multiplier
    return unscaled.square().sum(), torch.isfinite(unscaled).logical_not().any()


def squares(grad: Tensor, multiplier: Tensor) -> tuple[Tensor]:
    """The first result of :func:`measure`, without the last ``len(grad) % 4`` elements.

    The four quarters of the vector are summed side by side. In a compiled sum over one vector each addition waits for
    the previous one, so the sum takes three times as long as reading the vector.
    """
    quarter = grad.shape[0] // 4  # len() would be a constant of the trace
    a, b, c, d = ((grad[i * quarter : (i + 1) * quarter].float() * multiplier).square() for i in range(4))
    return (((a + b) + (c + d)).sum(),)


def clip_coef_without_eps(norm: Tensor, max_norm: float) -> Tensor:
    """``max_norm / norm`` if the norm is larger, else 1: LAMB clips without adding an epsilon to the norm.  # f32[]"""
    return torch.where(norm > max_norm, max_norm / norm, 1.0)


def update_of(rule: Rule, *, has_low: bool) -> Callable[..., tuple[()]]:
    """The second pass over one buffer: unscale and clip, apply ``rule``, round into the model's weight.

    Returns:
        A function of ``weight, [low,] *state, grad, numbers`` that updates ``weight``, ``low`` and ``state`` in place.
    """

    def update(weight: Tensor, *rest: Tensor) -> tuple[()]:
        low, state = (rest[0], rest[1:-2]) if has_low else (None, rest[:-2])
        grad, numbers = rest[-2:]
        wide = numbers.dtype
        multiplier, *constants = numbers.unbind()
        whole, *decoded = rule.decode(weight, state, wide)
        updated = rule(whole, grad.to(wide) * multiplier, decoded, constants)
        store(rule, updated, constants, weight, low, state)
        return ()

    return update


def store(
    rule: Rule,
    updated: Sequence[Tensor],
    constants: Sequence[Tensor],
    weight: Tensor,
    low: Tensor | None,
    state: Sequence[Tensor],
) -> None:
    """Write the new weight and state that ``rule`` has computed (``updated``) into the memory of a buffer."""
    for place, value in zip((weight, *state), rule.encode(updated, constants), strict=True):
        place.copy_(value)
    if low is not None:
        low.copy_(updated[0])
