"""LAMB: the rule of apex's FusedLAMB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.linalg import vector_norm

from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr
from halfpeak.fused.backends.base import BackendStep
from halfpeak.fused.base import FusedOptimizer, FusedOptions
from halfpeak.fused.decision import StepInputs
from halfpeak.fused.flat.layout import BufferSlice
from halfpeak.fused.rules.base import Rule
from halfpeak.ops.triton import KernelConfig


@dataclass(frozen=True, slots=True)
class LAMBRule(Rule):
    """Adam's update of each parameter, rescaled to the norm of the parameter.

    ::

        g  <- g + decay * w                                        (not decoupled)
        m  <- beta1 * m + beta3 * g
        v  <- beta2 * v + (1 - beta2) * g * g
        u   = m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps)
        u  <- u + decay * w                                        (decoupled)
        w  <- w - lr * |w| / |u| * u                               (trusts; else w - lr * u)

    ``beta3`` is ``1 - beta1``, or 1 without ``average``. If ``|w|`` or ``|u|`` is zero, their ratio counts as one. The
    rule expects gradients that are already clipped to a global norm.

    Attributes:
        decoupled: decay beside the gradient, as in AdamW.
        average: ``beta3 = 1 - beta1``.
        correct: divide by ``1 - beta**t``.
        trusts: rescale. apex rescales groups with weight decay, and with ``use_nvlamb`` all groups.

    Source: You et al., 2020 (arXiv:1904.00962); NVLAMB and the optional parts of the rule, NVIDIA's apex.

    Example:
        >>> import torch
        >>> rule = LAMBRule()
        >>> group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 0.0, "weight_decay": 0.0}
        >>> constants = [torch.tensor(x) for x in rule.constants(group, 1)]
        >>> zero = torch.zeros(2)
        >>> rule(torch.tensor([4.0, 4.0]), torch.tensor([7.0, -7.0]), (zero, zero), constants)[0]
        tensor([3.6000, 4.4000])
    """

    layerwise = True  # the ratio is of a whole parameter

    decoupled: bool = True
    average: bool = True
    correct: bool = True
    trusts: bool = True

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        beta1, beta2 = group["betas"]
        start1, start2 = (1 - beta1**step, 1 - beta2**step) if self.correct else (1.0, 1.0)
        beta3 = 1 - beta1 if self.average else 1.0
        decay = group["weight_decay"]
        return (beta1, beta3, beta2, 1 - beta2, 1 / start1, start2**-0.5, group["eps"], decay, group["lr"])

    def __call__(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        beta1, beta3, beta2, gain2, widen1, widen2, eps, decay, lr = constants
        if not self.decoupled:
            grad = grad + weight * decay
        first = state[0] * beta1 + grad * beta3
        second = state[1] * beta2 + grad * grad * gain2
        move = first * widen1 / (second.sqrt() * widen2 + eps)
        if self.decoupled:
            move = move + weight * decay
        if self.trusts:
            lr = lr * _ratio(vector_norm(weight), vector_norm(move))
        return weight - lr * move, first, second

    def kernel_config(self) -> KernelConfig | None:
        return KernelConfig("lamb", self.decoupled, trust=self.trusts)

    def hyper_params(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (*map(float, (*group["betas"], group["eps"])), float(self.correct), float(self.average))


def _ratio(size: Tensor, move: Tensor) -> Tensor:
    return torch.where((size != 0) & (move != 0), size / move, 1.0)


class FusedLAMB(FusedOptimizer):
    """LAMB for large batches; see :class:`~halfpeak.fused.rules.lamb.LAMBRule` for the rule.

    The gradients of all groups together are clipped to ``max_grad_norm`` first.

    Args:
        params: parameters or groups, dense, real, floating point.
        lr: learning rate: a number or a tensor of one element.
        bias_correction: correct the moments for their start at zero.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: factor of the weight that is added to the update before rescaling; see ``adam_w_mode``.
        adam_w_mode: decoupled weight decay; False adds the weight decay to the gradient.
        grad_averaging: weight gradients by ``1 - beta1`` in the first moment; False weights them by 1.
        max_grad_norm: the norm to which the gradients are clipped; 0 does not clip. A group with another value is
            refused, and a loaded state does not change the value.
        use_nvlamb: rescale the updates of groups without weight decay, too.
        options: see :class:`~halfpeak.fused.base.FusedOptions`.

    Raises:
        ConfigError: a value is out of its range, or a group has another ``max_grad_norm``.
        ParameterError: a parameter is not dense, real and floating point.

    Example:
        >>> weight = torch.nn.Parameter(torch.full((4,), 2.0))
        >>> optimizer = FusedLAMB([weight], lr=0.1, use_nvlamb=True, weight_decay=0.0)
        >>> weight.grad = torch.tensor([1.0, -2.0, 3.0, -4.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([1.8000, 2.2000, 1.8000, 2.2000])
    """

    copied = ("adam_w_mode", "use_nvlamb")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "maximize": False,
        }
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        super().__init__(params, defaults, **options)

    def rule(self, group: Mapping[str, Any]) -> LAMBRule:
        own = self.defaults["max_grad_norm"]
        if group["max_grad_norm"] != own:
            raise ConfigError(
                f"max_grad_norm={short_repr(group['max_grad_norm'])} in a parameter group differs from the optimizer's "
                f"{short_repr(own)}, and the gradients of all groups are clipped together; leave it out of the groups and "
                f"pass max_grad_norm= to {type(self).__name__}"
            )
        return LAMBRule(
            decoupled=self.adam_w_mode,
            average=bool(group["grad_averaging"]),
            correct=bool(group["bias_correction"]),
            trusts=self.use_nvlamb or group["weight_decay"] != 0,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, except for ``max_grad_norm``: that of the optimizer stays, as in apex.

        Raises:
            StateError: see :meth:`~halfpeak.fused.base.FusedOptimizer.check_state`.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["max_grad_norm"] = self.defaults["max_grad_norm"]

    def _backend_step(
        self, slices: Sequence[BufferSlice], inputs: StepInputs, found_inf: Tensor | None
    ) -> BackendStep:
        max_norm = self.defaults["max_grad_norm"]
        return super()._backend_step(slices, inputs, found_inf)._replace(max_norm=max_norm or None)
