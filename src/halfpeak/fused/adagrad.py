"""FusedAdagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfpeak.fused.layout import targets_of
from halfpeak.fused.optimizer import FusedOptimizer
from halfpeak.fused.roads.choose import RoadName
from halfpeak.fused.rules.adagrad import AdagradRule


class FusedAdagrad(FusedOptimizer):
    """Adagrad; see :class:`~halfpeak.fused.rules.adagrad.AdagradRule` for the rule.

    Its state goes into ``torch.optim.Adagrad`` and back.

    Args:
        params: parameters or groups, dense, real, floating point.
        lr: learning rate: a number or a tensor of one element.
        lr_decay: by which the learning rate falls as ``lr / (1 + (t - 1) * lr_decay)``.
        weight_decay: what is added to a gradient, times the weight.
        initial_accumulator_value: where the sum of squares starts.
        eps: what is added to its root.
        maximize: go up instead of down.
        road: how kernels run.

    Raises:
        ConfigError: a value is out of its range.
        ParameterError: a parameter is not dense, real and floating point.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = FusedAdagrad([weight], lr=0.5)
        >>> weight.grad = torch.tensor([1.0, -2.0, 3.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.5000, 1.5000, 0.5000])
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        road: RoadName = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(params, defaults, road=road)

    def rule(self, group: Mapping[str, Any]) -> AdagradRule:
        """The rule by which a group is stepped."""
        return AdagradRule()

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's layout, which has a row for every parameter, stepped or not."""
        state = super().state_dict()
        numbers = (index for group in state["param_groups"] for index in group["params"])
        starts = (group["initial_accumulator_value"] for group in self.param_groups for _ in group["params"])
        for index, target, start in zip(numbers, targets_of(self), starts, strict=True):
            if index not in state["state"]:
                wide = torch.promote_types(target.dtype, torch.float32)
                total = torch.full_like(target, start, dtype=wide, requires_grad=False)
                state["state"][index] = {"step": torch.zeros(()), "sum": total}
        return state
