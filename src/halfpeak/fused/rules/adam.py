"""Adam and AdamW: the rule of torch.optim.Adam, torch.optim.AdamW and apex's FusedAdam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfpeak.fused.rules.base import Count, Rule


@dataclass(frozen=True, slots=True)
class AdamRule(Rule):
    """Moments of the gradient and of its square, both corrected for their start at zero.

    ::

        g  <- g + decay * w                  (decay inside the gradient)
        w  <- w * (1 - lr * decay)           (decoupled)
        m  <- m + (1 - beta1) * (g - m)
        v  <- beta2 * v + (1 - beta2) * g * g
        w  <- w - lr / (1 - beta1**t) * m / (sqrt(v) / sqrt(1 - beta2**t) + eps)

    With ``amsgrad`` the root is taken of the largest ``v`` so far.

    Attributes:
        decoupled: AdamW's weight decay instead of Adam's.
        amsgrad: keep the largest second moment.
        correct: divide by ``1 - beta**t``.
        per_group: one count of steps per group, as apex.

    Source: Kingma and Ba, 2015; Loshchilov and Hutter, 2019; Reddi et al., 2018.

    Example:
        >>> import torch
        >>> rule = AdamRule()
        >>> group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        >>> constants = [torch.tensor(x) for x in rule.constants(group, 1)]
        >>> zero = torch.zeros(1)
        >>> rule(torch.ones(1), torch.full((1,), 5.0), (zero, zero), constants)[0]
        tensor([0.9000])
    """

    decoupled: bool = True
    amsgrad: bool = False
    correct: bool = True
    per_group: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of its state tensors."""
        first = ("exp_avg", "exp_avg_sq")
        return (*first, "max_exp_avg_sq") if self.amsgrad else first

    @property
    def count(self) -> Count:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        return "group" if self.per_group else "parameter"

    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        beta1, beta2 = group["betas"]
        lr, decay = group["lr"], group["weight_decay"]
        start1, start2 = (1 - beta1**step, 1 - beta2**step) if self.correct else (1.0, 1.0)
        shrink = 1 - lr * decay if self.decoupled else decay
        return (1 - beta1, beta2, 1 - beta2, lr / start1, start2**-0.5, group["eps"], shrink)

    def __call__(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        gain1, beta2, gain2, rate, widen, eps, shrink = constants
        if self.decoupled:
            weight = weight * shrink
        else:
            grad = grad + weight * shrink
        first = slots[0] + (grad - slots[0]) * gain1
        second = slots[1] * beta2 + grad * grad * gain2
        largest = (torch.maximum(slots[2], second),) if self.amsgrad else ()
        denominator = (largest or (second,))[0].sqrt() * widen + eps
        return (weight - rate * (first / denominator), first, second, *largest)

    def fused(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> bool:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        if not self.correct:
            return False
        beta1, beta2 = group["betas"]
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        kernel(
            [weight],
            [grad],
            [slots[0]],
            [slots[1]],
            [slots[2]] if self.amsgrad else [],
            [step],
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=self.amsgrad,
            maximize=False,
        )
        return True
