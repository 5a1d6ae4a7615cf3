"""Adagrad: the rule of torch.optim.Adagrad, and of apex's FusedAdagrad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfpeak.fused.rules.base import Count, Rule


@dataclass(frozen=True, slots=True)
class AdagradRule(Rule):
    """Each element has a learning rate that falls with the squares it has seen.

    ::

        g  <- g + decay * w                          (decay inside the gradient)
        s  <- s + g * g
        r   = lr / (1 + (t - 1) * lr_decay)
        w  <- w - r * g / (sqrt(s) + eps)
        w  <- w - r * decay * w                      (decoupled, of the weight before)

    Attributes:
        decoupled: decay beside the gradient, as in AdamW.
        counts: keep the number of steps; apex's, whose learning rate does not fall, keeps none.

    Source: Duchi, Hazan and Singer, 2011.

    Example:
        >>> import torch
        >>> rule = AdagradRule()
        >>> group = {"lr": 0.1, "lr_decay": 0.0, "eps": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0}
        >>> constants = [torch.tensor(x) for x in rule.constants(group, 1)]
        >>> rule(torch.ones(1), torch.full((1,), 4.0), [torch.zeros(1)], constants)
        (tensor([0.9000]), tensor([16.]))
    """

    decoupled: bool = False
    counts: bool = True

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of its state tensors."""
        return ("sum",)

    @property
    def count(self) -> Count:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        return "parameter" if self.counts else "nowhere"

    def initial(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        return (float(group.get("initial_accumulator_value", 0.0)),)

    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        rate = group["lr"] / (1 + (step - 1) * group["lr_decay"]) if self.counts else group["lr"]
        return (rate, group["eps"], group["weight_decay"])

    def __call__(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        rate, eps, decay = constants
        if not self.decoupled:
            grad = grad + weight * decay
        total = slots[0] + grad * grad
        move = grad / (total.sqrt() + eps)
        if self.decoupled:
            move = move + weight * decay
        return weight - rate * move, total

    def fused(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> bool:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        if self.decoupled or step.device.type != "cpu":
            return False
        torch._fused_adagrad_(
            [weight],
            [grad],
            [slots[0]],
            [step],
            lr=float(group["lr"]),
            lr_decay=float(group["lr_decay"]) if self.counts else 0.0,
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            maximize=False,
        )
        return True
