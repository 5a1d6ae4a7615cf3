"""Adagrad: the rule of torch.optim.Adagrad, and of apex's FusedAdagrad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from halfpeak.core.optimizer_state import params_of
from halfpeak.fused.base import FusedOptimizer, FusedOptions
from halfpeak.fused.rules.base import Rule
from halfpeak.ops.triton import KernelConfig


@dataclass(frozen=True, slots=True)
class AdagradRule(Rule):
    """Divides the gradient of each element by the root of the sum of its squares so far.

    ::

        g  <- g + decay * w                          (decay inside the gradient)
        s  <- s + g * g
        r   = lr / (1 + (t - 1) * lr_decay)
        w  <- w - r * g / (sqrt(s) + eps)
        w  <- w - r * decay * w                      (decoupled, of the weight before)

    Attributes:
        decoupled: decay beside the gradient, as in AdamW.
        step_scope: with ``"nowhere"``, as in apex's optimizer, ``lr_decay`` is not applied.

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

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("sum",)

    def initial(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (float(group.get("initial_accumulator_value", 0.0)),)

    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        falls = self.step_scope != "nowhere"
        rate = group["lr"] / (1 + (step - 1) * group["lr_decay"]) if falls else group["lr"]
        return (rate, group["eps"], group["weight_decay"])

    def __call__(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        rate, eps, decay = constants
        if not self.decoupled:
            grad = grad + weight * decay
        total = state[0] + grad * grad
        move = grad / (total.sqrt() + eps)
        if self.decoupled:
            move = move + weight * decay
        return weight - rate * move, total

    def torch_fused(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> bool:
        if self.decoupled:
            return False
        torch._fused_adagrad_(
            [weight],
            [grad],
            [state[0]],
            [step],
            lr=float(group["lr"]),
            lr_decay=float(group["lr_decay"]) if self.step_scope != "nowhere" else 0.0,
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            maximize=False,
        )
        return True

    def kernel_config(self) -> KernelConfig | None:
        return KernelConfig("adagrad", self.decoupled)

    def hyper_params(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (float(group["lr_decay"]) if self.step_scope != "nowhere" else 0.0, 0.0, float(group["eps"]))


class FusedAdagrad(FusedOptimizer):
    """Adagrad; see :class:`~halfpeak.fused.rules.adagrad.AdagradRule` for the rule.

    Its state goes into ``torch.optim.Adagrad`` and back.

    Args:
        params: parameters or groups, dense, real, floating point.
        lr: learning rate: a number or a tensor of one element.
        lr_decay: the learning rate of step ``t`` is ``lr / (1 + (t - 1) * lr_decay)``.
        weight_decay: factor of the weight that is added to the gradient.
        initial_accumulator_value: initial value of the sum of squares.
        eps: added to the root of the sum of squares.
        options: see :class:`~halfpeak.fused.base.FusedOptions`.

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
        **options: Unpack[FusedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": False,
        }
        super().__init__(params, defaults, **options)

    def rule(self, group: Mapping[str, Any]) -> AdagradRule:
        return AdagradRule()

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's layout: torch's Adagrad has a row for parameters that were never stepped, too."""
        state = super().state_dict()
        numbers = (index for group in state["param_groups"] for index in group["params"])
        starts = (group["initial_accumulator_value"] for group in self.param_groups for _ in group["params"])
        for index, target, start in zip(numbers, params_of(self), starts, strict=True):
            if index not in state["state"]:
                wide = torch.promote_types(target.dtype, torch.float32)
                total = torch.full_like(target, start, dtype=wide, requires_grad=False)
                state["state"][index] = {"step": torch.zeros((), dtype=torch.float32), "sum": total}
        return state
