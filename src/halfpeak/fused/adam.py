"""FusedAdam and FusedAdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfpeak.fused.optimizer import FusedOptimizer
from halfpeak.fused.roads.choose import RoadName
from halfpeak.fused.rules.adam import AdamRule


class FusedAdam(FusedOptimizer):
    """Adam; see :class:`~halfpeak.fused.rules.adam.AdamRule` for the rule."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        road: RoadName = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": self._decoupled,
        }
        super().__init__(params, defaults, road=road)

    _decoupled = False

    def rule(self, group: Mapping[str, Any]) -> AdamRule:
        """The rule by which a group is stepped."""
        return AdamRule(decoupled=self._decoupled, amsgrad=bool(group["amsgrad"]))


class FusedAdamW(FusedAdam):
    """AdamW; see :class:`~halfpeak.fused.rules.adam.AdamRule` for the rule."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        road: RoadName = "auto",
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, road=road)

    _decoupled = True
