"""FusedNovoGrad."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfpeak.fused.optimizer import FusedOptimizer
from halfpeak.fused.roads.choose import RoadName
from halfpeak.fused.rules.novograd import NovoGradRule


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad; see :class:`~halfpeak.fused.rules.novograd.NovoGradRule` for the rule.

    The second moment is one number per parameter, so the state takes half of Adam's memory.

    Args:
        params: parameters or groups, dense, real, floating point.
        lr: learning rate: a number or a tensor of one element.
        bias_correction: correct the moments for their start at zero.
        betas: how much of the first and of the second moment is kept.
        eps: what is added to the norm.
        weight_decay: how much of the weight is taken away.
        reg_inside_moment: divide and decay before the first moment instead of after it.
        grad_averaging: a gradient enters the first moment by ``1 - beta1``; False lets it enter whole.
        norm_type: 2, or ``float("inf")`` for the largest absolute value.
        init_zero: blend the first norm with zero.
        maximize: go up instead of down.
        road: how kernels run.

    Raises:
        ConfigError: a value is out of its range.
        ParameterError: a parameter is not dense, real and floating point.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = FusedNovoGrad([weight], lr=1.0, bias_correction=False, betas=(0.0, 0.5))
        >>> weight.grad = torch.tensor([3.0, -4.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.6000,  0.8000])
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        maximize: bool = False,
        road: RoadName = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
            "maximize": maximize,
        }
        self.reg_inside_moment = reg_inside_moment
        super().__init__(params, defaults, road=road)

    def rule(self, group: Mapping[str, Any]) -> NovoGradRule:
        """The rule by which a group is stepped."""
        return NovoGradRule(
            inside=self.reg_inside_moment,
            average=bool(group["grad_averaging"]),
            correct=bool(group["bias_correction"]),
            largest=group["norm_type"] == math.inf,
            from_zero=bool(group["init_zero"]),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "reg_inside_moment": self.reg_inside_moment}
