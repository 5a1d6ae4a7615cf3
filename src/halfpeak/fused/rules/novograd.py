"""NovoGrad: the rule of apex's FusedNovoGrad."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from torch import Tensor

from halfpeak.fused.base import FusedOptimizer, FusedOptions
from halfpeak.fused.rules.base import Rule
from halfpeak.ops.triton import KernelConfig


@dataclass(frozen=True, slots=True)
class NovoGradRule(Rule):
    """Momentum over gradients that are divided by a running norm of each parameter's gradient.

    ::

        n  <- sqrt(beta2 * n**2 + (1 - beta2) * |g|**2)       (norm 2)
        n  <- beta2 * n + (1 - beta2) * max(|g|)              (norm inf)
        d   = n / sqrt(1 - beta2**t) + eps
        m  <- beta1 * m + beta3 * g                           (decay beside the moment)
        w  <- w - lr * (m / (1 - beta1**t) / d + decay * w)
        m  <- beta1 * m + beta3 * (g / d + decay * w)         (inside)
        w  <- w - lr * m / (1 - beta1**t)

    ``beta3`` is ``1 - beta1``, or 1 without ``average``. In the first step ``n`` is the norm of ``g``, unless
    ``from_zero``. ``n`` is stored as ``exp_avg_sq``, apex's name, although it is a norm and not a square.

    Attributes:
        inside: divide and decay before the moment instead of after it.
        average: ``beta3 = 1 - beta1``.
        correct: divide by ``1 - beta1**t`` and ``sqrt(1 - beta2**t)``.
        largest: the norm is the largest absolute value instead of the 2-norm.
        from_zero: average the first norm with zero.

    Source: Ginsburg et al., 2019 (arXiv:1905.11286); the optional parts of the rule, NVIDIA's apex.

    Example:
        >>> import torch
        >>> rule = NovoGradRule(correct=False)
        >>> group = {"lr": 1.0, "betas": (0.5, 0.5), "eps": 0.0, "weight_decay": 0.0}
        >>> constants = [torch.tensor(x) for x in rule.constants(group, 1)]
        >>> rule(torch.zeros(2), torch.tensor([3.0, 4.0]), (torch.zeros(2), torch.zeros(1)), constants)
        (tensor([-0.3000, -0.4000]), tensor([1.5000, 2.0000]), tensor([5.]))
    """

    layerwise = True  # the norm is of a whole parameter
    per_param_scalars = 1  # the norm

    inside: bool = False
    average: bool = True
    correct: bool = True
    largest: bool = False
    from_zero: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        beta1, beta2 = group["betas"]
        start1, start2 = (1 - beta1**step, 1 - beta2**step) if self.correct else (1.0, 1.0)
        beta3 = 1 - beta1 if self.average else 1.0
        keep, gain = beta2, 1 - beta2
        if not self.from_zero:
            # As arithmetic and not as a branch, because step may be a tensor on an accelerator.
            keep, gain = beta2 * (step > 1), 1 - beta2 + beta2 * (step <= 1)
        decay = group["weight_decay"]
        return (beta1, beta3, keep, gain, 1 / start1, start2**-0.5, group["eps"], decay, group["lr"])

    def __call__(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        beta1, beta3, keep, gain, widen1, widen2, eps, decay, lr = constants
        first, norm = state
        if self.largest:
            norm = norm * keep + grad.abs().max() * gain
        else:
            norm = (norm * norm * keep + grad.square().sum() * gain).sqrt()
        divisor = norm * widen2 + eps
        if self.inside:
            first = first * beta1 + (grad / divisor + weight * decay) * beta3
            return weight - lr * (first * widen1), first, norm
        first = first * beta1 + grad * beta3
        return weight - lr * (first * widen1 / divisor + weight * decay), first, norm

    def kernel_config(self) -> KernelConfig | None:
        return KernelConfig("novograd", self.inside, norm="largest" if self.largest else "squares")

    def hyper_params(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        switches = (self.correct, self.average, not self.from_zero)
        return (*map(float, (*group["betas"], group["eps"])), *map(float, switches))


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad; see :class:`~halfpeak.fused.rules.novograd.NovoGradRule` for the rule.

    The second moment is one number per parameter, so the state takes half of Adam's memory.

    Args:
        params: parameters or groups, dense, real, floating point.
        lr: learning rate: a number or a tensor of one element.
        bias_correction: correct the moments for their start at zero.
        betas: decay rates of the first moment and of the norm.
        eps: added to the norm.
        weight_decay: factor of the weight that is added to the update; see ``reg_inside_moment``.
        reg_inside_moment: divide by the norm and decay before the first moment instead of after it.
        grad_averaging: weight gradients by ``1 - beta1`` in the first moment; False weights them by 1.
        norm_type: 2, or ``float("inf")`` for the largest absolute value.
        init_zero: average the first norm with zero.
        options: see :class:`~halfpeak.fused.base.FusedOptions`.

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

    copied = ("reg_inside_moment",)

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
        **options: Unpack[FusedOptions],
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
            "maximize": False,
        }
        self.reg_inside_moment = reg_inside_moment
        super().__init__(params, defaults, **options)

    def rule(self, group: Mapping[str, Any]) -> NovoGradRule:
        return NovoGradRule(
            inside=self.reg_inside_moment,
            average=bool(group["grad_averaging"]),
            correct=bool(group["bias_correction"]),
            largest=group["norm_type"] == math.inf,
            from_zero=bool(group["init_zero"]),
        )
