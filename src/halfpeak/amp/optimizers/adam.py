"""``apex.optimizers.FusedAdam``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from halfpeak.amp.optimizers.form import no_amsgrad
from halfpeak.amp.optimizers.masters import OwnMasters
from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import ConfigError
from halfpeak.fused.optimizer import FusedOptimizer
from halfpeak.fused.rules.adam import AdamRule


class FusedAdam(OwnMasters):
    """Adam, or AdamW with ``adam_w_mode``, which is on by default; see :class:`halfpeak.fused.rules.adam.AdamRule`.

    State per parameter: ``exp_avg`` and ``exp_avg_sq``, in float32; per group: ``step``. Low parameters are stepped in
    float32 and rounded.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: correct the moments for their start at zero.
        betas: how much of the first and of the second moment is kept.
        eps: what is added to the root of the second moment.
        adam_w_mode: decoupled weight decay.
        weight_decay: weight decay.
        amsgrad: refused.
        set_grad_none: :meth:`zero_grad` drops gradients.
        capturable: no effect here.
        master_weights: float32 copies of low parameters move. Needs ``capturable``.

    Raises:
        ConfigError: ``amsgrad``; ``master_weights`` without ``capturable``; a value out of its range.
    """

    kept = (*OwnMasters.kept, "adam_w_mode", "capturable", "master_weights")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        no_amsgrad(amsgrad)
        if master_weights and not capturable:
            raise ConfigError("master_weights=True needs capturable=True, as in apex; write both")
        self.set_grad_none = set_grad_none
        self.adam_w_mode = int(adam_w_mode)
        self.capturable = capturable
        self.master_weights = master_weights
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def rule(self, group: Mapping[str, Any]) -> AdamRule:
        """The rule by which a group is stepped."""
        correct = bool(group["bias_correction"])
        return AdamRule(decoupled=bool(self.adam_w_mode), correct=correct, per_group=True)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: object = None,
        output_params: object = None,
        scale: object = None,
        grad_norms: object = None,
        **others: Any,
    ) -> Any:
        """Move every parameter that has a gradient.

        Args:
            closure: computes the loss anew and returns it.
            grads: refused, with the next three; ``apex.contrib.optimizers.FusedAdam`` takes them.
            output_params: refused.
            scale: refused.
            grad_norms: refused.
            others: ``grad_scaler``, whose scale divides the gradients, and which skips if one is not finite.

        Raises:
            ConfigError: an argument that only the older form took.
        """
        given = {"grads": grads, "output_params": output_params, "scale": scale, "grad_norms": grad_norms}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is an argument of apex.contrib.optimizers.FusedAdam.step; use that class, or leave it out"
                )
        return step_with_scaler(self, super().step, closure, **others)

    def has_master(self, parameter: Tensor) -> bool:
        """With ``master_weights``, every low parameter."""
        return self.master_weights and is_low(parameter)

    def inside(self, masters: Sequence[Tensor]) -> FusedOptimizer:
        """The optimizer that steps masters."""
        return FusedAdam(masters, adam_w_mode=bool(self.adam_w_mode))


def step_with_scaler(
    optimizer: FusedOptimizer,
    step: Callable[..., Any],
    closure: Callable[[], Any] | None,
    grad_scaler: Any = None,
) -> Any:
    """Step with what a torch ``GradScaler`` knows: ``scaler.step(optimizer)`` gives that, and ``grad_scaler=`` asks for it."""
    if grad_scaler is None:
        return step(closure)
    found: dict[Any, Tensor] = grad_scaler._check_inf_per_device(optimizer)
    values = list(found.values())
    given = {"grad_scale": grad_scaler._get_scale_async(), "found_inf": sum(values[1:], values[0])}
    vars(optimizer).update(given)
    try:
        return step(closure)
    finally:
        for name in given:
            vars(optimizer).pop(name, None)
