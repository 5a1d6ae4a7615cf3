"""SGD with momentum: the rule of torch.optim.SGD, and of apex's FusedSGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor

from halfpeak.fused.base import FusedOptimizer, FusedOptions
from halfpeak.fused.rules.base import Rule, StepScope
from halfpeak.ops.triton import KernelConfig


@dataclass(frozen=True, slots=True)
class SGDRule(Rule):
    """Steepest descent along a decaying sum of gradients.

    ::

        g  <- g + decay * w                          (unless late)
        b  <- g                                      (first step)
        b  <- momentum * b + (1 - dampening) * g     (every other)
        g  <- b,  or  g + momentum * b               (nesterov)
        w  <- w - lr * g

    Attributes:
        momentum: keep the buffer ``b``; without it the step follows the gradient itself.
        nesterov: Nesterov's momentum.
        late: apply ``g <- g + decay * w`` after the momentum, so that the buffer contains no weight decay.

    Source: Polyak, 1964; Nesterov, 1983; Sutskever et al., 2013.

    Example:
        >>> import torch
        >>> rule = SGDRule(momentum=True)
        >>> group = {"lr": 0.5, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.0}
        >>> first, second = ([torch.tensor(x) for x in rule.constants(group, step)] for step in (1, 2))
        >>> weight, buffer = rule(torch.ones(1), torch.ones(1), [torch.zeros(1)], first)
        >>> weight, buffer
        (tensor([0.5000]), tensor([1.]))
        >>> rule(weight, torch.ones(1), [buffer], second)
        (tensor([-0.2000]), tensor([1.4000]))
    """

    momentum: bool = False
    nesterov: bool = False
    late: bool = False
    step_scope: StepScope = field(default="nowhere", kw_only=True)  # torch's SGD stores none

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        # As arithmetic and not as a branch, because step may be a tensor on an accelerator.
        gain = 1 - group["dampening"] + group["dampening"] * (step <= 1)
        return (group["lr"], group["momentum"], gain, group["weight_decay"])

    def __call__(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        lr, momentum, gain, decay = constants
        if not self.late:
            grad = grad + weight * decay
        buffers: tuple[Tensor, ...] = ()
        if self.momentum:
            # The buffer starts at zero, so the first step needs no branch.
            buffer = state[0] * momentum + grad * gain
            buffers, grad = (buffer,), grad + buffer * momentum if self.nesterov else buffer
        if self.late:
            grad = grad + weight * decay
        return (weight - lr * grad, *buffers)

    def torch_fused(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> bool:
        if self.late:
            return False
        torch._fused_sgd_(
            [weight],
            [grad],
            [state[0]] if self.momentum else [],
            weight_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
            lr=float(group["lr"]),
            dampening=float(group["dampening"]),
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=float(step) <= 1,
        )
        return True

    def kernel_config(self) -> KernelConfig | None:
        option = ("nesterov" if self.nesterov else "momentum") if self.momentum else ""
        return KernelConfig("sgd", option, self.late)

    def hyper_params(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (float(group["momentum"]), float(group["dampening"]))


class FusedSGD(FusedOptimizer):
    """SGD with momentum; see :class:`~halfpeak.fused.rules.sgd.SGDRule` for the rule.

    Its state goes into ``torch.optim.SGD`` and back.

    Args:
        params: parameters or groups, dense, real, floating point.
        lr: learning rate: a number or a tensor of one element.
        momentum: factor of the buffer in each step; 0 keeps no buffer.
        dampening: gradients enter the buffer times ``1 - dampening``, except the first.
        weight_decay: factor of the weight that is added to the gradient.
        nesterov: Nesterov's momentum.
        options: see :class:`~halfpeak.fused.base.FusedOptions`.

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
        **options: Unpack[FusedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": False,
        }
        super().__init__(params, defaults, **options)

    def rule(self, group: Mapping[str, Any]) -> SGDRule:
        return SGDRule(momentum=group["momentum"] != 0, nesterov=bool(group["nesterov"]))
