"""FusedSGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfpeak.fused.optimizer import FusedOptimizer
from halfpeak.fused.roads.choose import RoadName
from halfpeak.fused.rules.sgd import SGDRule


class FusedSGD(FusedOptimizer):
    """SGD with momentum; see :class:`~halfpeak.fused.rules.sgd.SGDRule` for the rule.

    Its state goes into ``torch.optim.SGD`` and back.

    Args:
        params: parameters or groups, dense, real, floating point.
        lr: learning rate: a number or a tensor of one element.
        momentum: what is left of the buffer at each step; 0 keeps no buffer.
        dampening: what is left out of a gradient that enters the buffer; the first enters whole.
        weight_decay: what is added to a gradient, times the weight.
        nesterov: Nesterov's momentum.
        maximize: go up instead of down.
        road: how kernels run.

    Raises:
        ConfigError: a value is out of its range.
        ParameterError: a parameter is not dense, real and floating point.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = FusedSGD([weight], lr=0.5, momentum=0.9)
        >>> for _ in range(2):
        ...     weight.grad = torch.ones(3)
        ...     optimizer.step()
        >>> weight.data
        tensor([-0.4500, -0.4500, -0.4500])
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        road: RoadName = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, road=road)

    def rule(self, group: Mapping[str, Any]) -> SGDRule:
        """The rule by which a group is stepped."""
        return SGDRule(momentum=group["momentum"] != 0, nesterov=bool(group["nesterov"]))
