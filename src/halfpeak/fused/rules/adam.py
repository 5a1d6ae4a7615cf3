"""Adam and AdamW: the rule of torch.optim.Adam, torch.optim.AdamW and apex's FusedAdam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from halfpeak.fused.base import FusedOptimizer, FusedOptions
from halfpeak.fused.rules.base import Rule
from halfpeak.fused.state_dtypes.quantized_rule import MasterFormat, StateFormat
from halfpeak.ops.triton import KernelConfig


@dataclass(frozen=True, slots=True)
class AdamRule(Rule):
    """Moments of the gradient and of its square, both corrected for their start at zero.

    ::

        g  <- g + decay * w                  (decay inside the gradient)
        w  <- w * (1 - lr * decay)           (decoupled)
        m  <- m + (1 - beta1) * (g - m)
        v  <- beta2 * v + (1 - beta2) * g * g
        w  <- w - lr / (1 - beta1**t) * m / (sqrt(v) / sqrt(1 - beta2**t) + eps)

    With ``amsgrad`` the root is that of the largest ``v`` so far.

    Attributes:
        decoupled: AdamW's weight decay instead of Adam's.
        amsgrad: keep the largest second moment.
        correct: divide by ``1 - beta**t``.

    Source: Kingma and Ba, 2015 (arXiv:1412.6980); AdamW, Loshchilov and Hutter, 2019 (arXiv:1711.05101); AMSGrad, Reddi et
    al., 2018 (arXiv:1904.09237).

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

    @property
    def state_names(self) -> tuple[str, ...]:
        first = ("exp_avg", "exp_avg_sq")
        return (*first, "max_exp_avg_sq") if self.amsgrad else first

    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        beta1, beta2 = group["betas"]
        lr, decay = group["lr"], group["weight_decay"]
        start1, start2 = (1 - beta1**step, 1 - beta2**step) if self.correct else (1.0, 1.0)
        shrink = 1 - lr * decay if self.decoupled else decay
        return (1 - beta1, beta2, 1 - beta2, lr / start1, start2**-0.5, group["eps"], shrink)

    def __call__(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        gain1, beta2, gain2, rate, widen, eps, shrink = constants
        if self.decoupled:
            weight = weight * shrink
        else:
            grad = grad + weight * shrink
        first = state[0] + (grad - state[0]) * gain1
        second = state[1] * beta2 + grad * grad * gain2
        largest = (torch.maximum(state[2], second),) if self.amsgrad else ()
        denominator = (largest or (second,))[0].sqrt() * widen + eps
        return (weight - rate * (first / denominator), first, second, *largest)

    def torch_fused(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> bool:
        if not self.correct:
            return False
        beta1, beta2 = group["betas"]
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        kernel(
            [weight],
            [grad],
            [state[0]],
            [state[1]],
            [state[2]] if self.amsgrad else [],
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

    def kernel_config(self) -> KernelConfig | None:
        return KernelConfig("adam", self.decoupled, self.amsgrad)

    def hyper_params(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (*map(float, (*group["betas"], group["eps"])), float(self.correct), float(self.decoupled))


class AdamOptions(FusedOptions, total=False):
    """Keywords of :class:`FusedAdam` and :class:`FusedAdamW`.

    Attributes:
        master: where what low-precision weights round away is stored; see
            :class:`~halfpeak.fused.state_dtypes.quantized_rule.StateFormat`. ``"remainder"`` gives the updates of a float32
            master, bit for bit, in 2 bytes per parameter less.
        moments: how the moments are stored: ``torch.float32``, ``torch.bfloat16`` or ``"int8"``.
    """

    master: MasterFormat
    moments: torch.dtype | Literal["int8"]


class FusedAdam(FusedOptimizer):
    """Adam; see :class:`~halfpeak.fused.rules.adam.AdamRule` for the rule.

    Its state goes into ``torch.optim.Adam`` and back. apex's ``FusedAdam`` was AdamW by default: that is
    :class:`FusedAdamW`.

    Args:
        params: parameters or groups, dense, real, floating point.
        lr: learning rate: a number or a tensor of one element.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: factor of the weight that is added to the gradient.
        amsgrad: divide by the root of the largest second moment so far.
        master, moments, options: see :class:`AdamOptions`.

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
        master: MasterFormat = "float32",
        moments: torch.dtype | Literal["int8"] = torch.float32,
        **options: Unpack[FusedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": False,
            "decoupled_weight_decay": self._decoupled,
        }
        super().__init__(params, defaults, state_format=StateFormat(master, moments), **options)

    _decoupled = False

    def rule(self, group: Mapping[str, Any]) -> Rule:
        rule = AdamRule(decoupled=self._decoupled, amsgrad=bool(group.get("amsgrad")))
        return self._state_format.of(rule, squares=(False, True, True)[: len(rule.state_names)])


class FusedAdamW(FusedAdam):
    """AdamW; see :class:`~halfpeak.fused.rules.adam.AdamRule` for the rule.

    Its state goes into ``torch.optim.AdamW`` and back. Arguments and errors are those of :class:`FusedAdam`, but
    ``weight_decay`` times the learning rate is the fraction by which a weight shrinks in a step.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = FusedAdamW([weight], lr=0.5, eps=0.0, weight_decay=0.2)
        >>> weight.grad = torch.tensor([0.1, -2.0, 30.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.4000, 1.4000, 0.4000])
    """

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[AdamOptions],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
