"""``apex.optimizers.FusedLAMB`` and ``FusedMixedPrecisionLamb``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfpeak import fused
from halfpeak.amp.optimizers.adam import step_with_scaler
from halfpeak.amp.optimizers.form import ApexForm, no_amsgrad
from halfpeak.amp.optimizers.masters import OwnMasters
from halfpeak.fused.optimizer import FusedOptimizer
from halfpeak.fused.rules.lamb import LAMBRule


class FusedLAMB(ApexForm, fused.FusedLAMB):
    """LAMB; see :class:`halfpeak.fused.FusedLAMB`, which has the same arguments.

    State per parameter: ``exp_avg`` and ``exp_avg_sq``; per group: ``step``. ``max_grad_norm=0`` does not clip; apex
    then let no gradient through.

    Raises:
        ConfigError: ``amsgrad``; a value out of its range.
    """

    kept = (*ApexForm.kept, "adam_w_mode", "use_nvlamb")

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
        use_nvlamb: bool = False,
    ) -> None:
        no_amsgrad(amsgrad)
        self.set_grad_none = set_grad_none
        fused.FusedLAMB.__init__(
            self,
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            adam_w_mode=adam_w_mode,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )

    def rule(self, group: Mapping[str, Any]) -> LAMBRule:
        """The rule by which a group is stepped."""
        return replace(super().rule(group), per_group=True)


class FusedMixedPrecisionLamb(OwnMasters, FusedLAMB):
    """LAMB whose learning rate and step are tensors, for torch's gradient scaler, with masters of low parameters.

    Args:
        params: parameters or groups.
        lr: learning rate; each group gets a tensor of its own.
        step: the number of steps taken.
        reduced_precision_dtype: parameters of this dtype are moved in float32 copies and rounded from them.

    The other arguments are those of :class:`FusedLAMB`.

    Raises:
        ConfigError: ``amsgrad``; a value out of its range.
    """

    kept = (*OwnMasters.kept, "adam_w_mode", "use_nvlamb", "reduced_precision_dtype")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        self.reduced_precision_dtype = reduced_precision_dtype
        self._masters = {}
        FusedLAMB.__init__(
            self,
            params,
            torch.as_tensor(lr, dtype=torch.float32),
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )
        for group in self.param_groups:
            group["step"] = step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with a learning rate tensor of its own."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).clone()

    def step(self, closure: Callable[[], Any] | None = None, **others: Any) -> Any:
        """Move every parameter that has a gradient.

        Args:
            closure: computes the loss anew and returns it.
            others: ``grad_scaler``, whose scale divides the gradients, and which skips if one is not finite.
        """
        return step_with_scaler(self, super().step, closure, **others)

    def has_master(self, parameter: Tensor) -> bool:
        """Every parameter of the reduced dtype."""
        return self.reduced_precision_dtype is not None and parameter.dtype == self.reduced_precision_dtype

    def inside(self, masters: Sequence[Tensor]) -> FusedOptimizer:
        """The optimizer that steps masters."""
        return FusedLAMB(
            masters,
            adam_w_mode=self.adam_w_mode,
            use_nvlamb=self.use_nvlamb,
            max_grad_norm=self.defaults["max_grad_norm"],
        )
