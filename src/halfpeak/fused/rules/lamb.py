"""LAMB: the rule of apex's FusedLAMB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from halfpeak.fused.rules.base import Count, Rule


@dataclass(frozen=True, slots=True)
class LAMBRule(Rule):
    """Adam's step for each parameter, rescaled to the size of the parameter.

    ::

        g  <- g + decay * w                                        (not decoupled)
        m  <- beta1 * m + beta3 * g
        v  <- beta2 * v + (1 - beta2) * g * g
        u   = m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps)
        u  <- u + decay * w                                        (decoupled)
        w  <- w - lr * |w| / |u| * u                               (trusts; else w - lr * u)

    ``beta3`` is ``1 - beta1``, or 1 where gradients are not averaged. Where ``|w|`` or ``|u|`` is zero the ratio is one.
    Gradients come clipped to a global norm: who feeds the rule does that.

    Attributes:
        decoupled: decay beside the gradient, as in AdamW.
        average: ``beta3 = 1 - beta1``.
        correct: divide by ``1 - beta**t``.
        trusts: rescale. apex does so where there is weight decay, and with ``use_nvlamb`` everywhere.
        per_group: one count of steps per group, as apex.

    Source: You et al., 2020; NVIDIA's NVLAMB.

    Example:
        >>> import torch
        >>> rule = LAMBRule()
        >>> group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 0.0, "weight_decay": 0.0}
        >>> constants = [torch.tensor(x) for x in rule.constants(group, 1)]
        >>> zero = torch.zeros(2)
        >>> rule(torch.tensor([4.0, 4.0]), torch.tensor([7.0, -7.0]), (zero, zero), constants)[0]
        tensor([3.6000, 4.4000])
    """

    decoupled: bool = True
    average: bool = True
    correct: bool = True
    trusts: bool = True
    per_group: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of its state tensors."""
        return ("exp_avg", "exp_avg_sq")

    @property
    def layerwise(self) -> bool:
        """The ratio is of a whole parameter."""
        return True

    @property
    def count(self) -> Count:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        return "group" if self.per_group else "parameter"

    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        beta1, beta2 = group["betas"]
        start1, start2 = (1 - beta1**step, 1 - beta2**step) if self.correct else (1.0, 1.0)
        beta3 = 1 - beta1 if self.average else 1.0
        decay = group["weight_decay"]
        return (beta1, beta3, beta2, 1 - beta2, 1 / start1, start2**-0.5, group["eps"], decay, group["lr"])

    def __call__(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        beta1, beta3, beta2, gain2, widen1, widen2, eps, decay, lr = constants
        if not self.decoupled:
            grad = grad + weight * decay
        first = slots[0] * beta1 + grad * beta3
        second = slots[1] * beta2 + grad * grad * gain2
        move = first * widen1 / (second.sqrt() * widen2 + eps)
        if self.decoupled:
            move = move + weight * decay
        if self.trusts:
            lr = lr * _ratio(vector_norm(weight), vector_norm(move))
        return weight - lr * move, first, second


def _ratio(size: Tensor, move: Tensor) -> Tensor:
    return torch.where((size != 0) & (move != 0), size / move, 1.0)
