"""FusedAdam and FusedAdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from halfpeak.fused.forms.storage import Master, Storage
from halfpeak.fused.optimizer import FusedOptimizer
from halfpeak.fused.roads.choose import RoadName
from halfpeak.fused.rules.adam import AdamRule
from halfpeak.fused.rules.base import Rule


class FusedAdam(FusedOptimizer):
    """Adam; see :class:`~halfpeak.fused.rules.adam.AdamRule` for the rule.

    Its state goes into ``torch.optim.Adam`` and back. apex's ``FusedAdam`` was AdamW by default: that is
    :class:`FusedAdamW`.

    Args:
        params: parameters or groups, dense, real, floating point.
        lr: learning rate: a number or a tensor of one element.
        betas: how much of the first and of the second moment is kept.
        eps: what is added to the root of the second moment.
        weight_decay: what is added to a gradient, times the weight.
        amsgrad: divide by the largest second moment so far.
        maximize: go up instead of down.
        road: how kernels run.
        master: where the digits of bfloat16 weights are that the model does not see; see
            :class:`~halfpeak.fused.forms.storage.Storage`. ``"remainder"`` gives the updates of a float32 master, bit for
            bit, in 2 bytes per parameter less.
        moments: the form of the moments: ``torch.float32``, ``torch.bfloat16`` or ``"int8"``.

    Raises:
        ConfigError: a value is out of its range.
        ParameterError: a parameter is not dense, real and floating point.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = FusedAdam([weight], lr=0.5, eps=0.0, weight_decay=0.0)
        >>> weight.grad = torch.tensor([0.1, -2.0, 30.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.5000, 1.5000, 0.5000])
    """

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
        master: Master = "float32",
        moments: torch.dtype | Literal["int8"] = torch.float32,
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
        super().__init__(params, defaults, road=road, storage=Storage(master, moments))

    _decoupled = False

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """The rule by which a group is stepped."""
        rule = AdamRule(decoupled=self._decoupled, amsgrad=bool(group["amsgrad"]))
        return self._storage.of(rule, squares=(False, True, True)[: len(rule.slots)])


class FusedAdamW(FusedAdam):
    """AdamW; see :class:`~halfpeak.fused.rules.adam.AdamRule` for the rule.

    Its state goes into ``torch.optim.AdamW`` and back.

    Args:
        params: parameters or groups, dense, real, floating point.
        lr: learning rate: a number or a tensor of one element.
        betas: how much of the first and of the second moment is kept.
        eps: what is added to the root of the second moment.
        weight_decay: how much of the weight is taken away, times the learning rate.
        amsgrad: divide by the largest second moment so far.
        maximize: go up instead of down.
        road: how kernels run.
        master: where the digits of bfloat16 weights are that the model does not see; see
            :class:`~halfpeak.fused.forms.storage.Storage`. ``"remainder"`` gives the updates of a float32 master, bit for
            bit, in 2 bytes per parameter less.
        moments: the form of the moments: ``torch.float32``, ``torch.bfloat16`` or ``"int8"``.

    Raises:
        ConfigError: a value is out of its range.
        ParameterError: a parameter is not dense, real and floating point.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = FusedAdamW([weight], lr=0.5, eps=0.0, weight_decay=0.2)
        >>> weight.grad = torch.tensor([0.1, -2.0, 30.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.4000, 1.4000, 0.4000])
    """

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
        master: Master = "float32",
        moments: torch.dtype | Literal["int8"] = torch.float32,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            road=road,
            master=master,
            moments=moments,
        )

    _decoupled = True
