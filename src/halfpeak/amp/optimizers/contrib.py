"""``apex.contrib.optimizers``: the older forms, which step masters from low gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from halfpeak.amp.optimizers import sgd
from halfpeak.amp.optimizers.fed import FedForm, Lists
from halfpeak.amp.optimizers.form import no_amsgrad
from halfpeak.amp.optimizers.lamb import FusedLAMB as PlainLAMB
from halfpeak.core.errors import OrderError
from halfpeak.fused.rules.base import Rule


@dataclass(frozen=True, slots=True)
class OldAdamRule(Rule):
    """Adam as its paper's second form has it: the corrections are in the step size, ``eps`` and decay beside the moments.

    ::

        m  <- beta1 * m + (1 - beta1) * g
        v  <- beta2 * v + (1 - beta2) * g * g
        s   = lr * sqrt(1 - beta2**t) / (1 - beta1**t)
        w  <- w - s * (m / (sqrt(v) + eps) + decay * w)

    Attributes:
        inside: ``sqrt(v + eps)``.
        correct: False makes ``s = lr``.
    """

    inside: bool = False
    correct: bool = True

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of its state tensors."""
        return ("exp_avg", "exp_avg_sq")

    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        beta1, beta2 = group["betas"]
        size = group["lr"] * ((1 - beta2**step) ** 0.5 / (1 - beta1**step) if self.correct else 1.0)
        return (beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], group["weight_decay"], size)

    def __call__(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        beta1, gain1, beta2, gain2, eps, decay, size = constants
        first = slots[0] * beta1 + grad * gain1
        second = slots[1] * beta2 + grad * grad * gain2
        root = (second + eps).sqrt() if self.inside else second.sqrt() + eps
        return weight - size * (first / root + weight * decay), first, second


class FusedAdam(FedForm):
    """Adam in its older form; see :class:`OldAdamRule`. ``step`` takes gradients and low parameters.

    State per parameter: ``step``, ``exp_avg``, ``exp_avg_sq``.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: correct the moments for their start at zero.
        betas: how much of the first and of the second moment is kept.
        eps: what is added to the root of the second moment, or inside it.
        eps_inside_sqrt: add it inside.
        weight_decay: weight decay.
        max_grad_norm: the largest norm of a group's gradients; 0 does not clip. Needs ``grad_norms`` in ``step``.
        amsgrad: refused.
        use_mt: no effect here.
        amp_scale_adjustment: no effect here: it was for a protocol that left apex before 25.04.

    Raises:
        ConfigError: ``amsgrad``; a value out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        no_amsgrad(amsgrad)
        self.eps_mode = 0 if eps_inside_sqrt else 1
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)

    def rule(self, group: Mapping[str, Any]) -> OldAdamRule:
        """The rule by which a group is stepped."""
        return OldAdamRule(inside=self.eps_mode == 0, correct=bool(group["bias_correction"]))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "eps_mode": self.eps_mode}


class FusedSGD(FedForm, sgd.FusedSGD):
    """SGD with momentum whose ``step`` takes gradients and low parameters; the arguments are ``apex.optimizers.FusedSGD``'s.

    Raises:
        ConfigError: a value out of its range.
    """

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Lists | None = None,
        output_params: Lists | None = None,
        scale: float = 1.0,
        grad_norms: Sequence[Tensor | float] | None = None,
    ) -> Any:
        """See :class:`FedForm`.

        Raises:
            OrderError: no ``grads``.
        """
        if grads is None:
            raise OrderError(
                "apex.contrib.optimizers.FusedSGD steps gradients that it is given; wrap it in "
                "apex.contrib.optimizers.FP16_Optimizer, or use apex.optimizers.FusedSGD"
            )
        return super().step(closure, grads, output_params, scale, grad_norms)


class FusedLAMB(PlainLAMB):
    """LAMB whose ratio holds for every parameter, with weight decay or without.

    The arguments are those of ``apex.optimizers.FusedLAMB``, but for ``use_nvlamb``.

    Raises:
        ConfigError: ``amsgrad``; a value out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
    ) -> None:
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            set_grad_none,
            max_grad_norm,
            use_nvlamb=True,
        )
