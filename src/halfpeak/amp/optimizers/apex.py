"""The classes of ``apex.optimizers`` as of 25.04: fused optimizers with apex's arguments, defaults, rules and state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from halfpeak import fused
from halfpeak.amp.optimizers.internal_masters import ApexOptimizer, InternalMasters
from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import ConfigError, StateError
from halfpeak.core.short_repr import short_repr
from halfpeak.fused.rules.adagrad import AdagradRule
from halfpeak.fused.rules.adam import AdamRule
from halfpeak.fused.rules.lamb import LAMBRule
from halfpeak.fused.rules.novograd import NovoGradRule
from halfpeak.fused.rules.sgd import SGDRule

Betas = tuple[float, float]


class FusedAdagrad(ApexOptimizer):
    """Adagrad; see :class:`halfpeak.fused.rules.adagrad.AdagradRule`. ``adagrad_w_mode`` decouples the weight decay.

    State per parameter: ``sum``.
    """

    copied = ("adagrad_w_mode",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.set_grad_none, self.adagrad_w_mode = set_grad_none, adagrad_w_mode
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def rule(self, group: Mapping[str, Any]) -> AdagradRule:
        return AdagradRule(decoupled=bool(self.adagrad_w_mode), step_scope="nowhere")


class FusedAdam(InternalMasters):
    """Adam, or AdamW with ``adam_w_mode``, which is on by default; see :class:`halfpeak.fused.rules.adam.AdamRule`.

    State per parameter: ``exp_avg`` and ``exp_avg_sq``, in float32; per group: ``step``. Low-precision parameters are
    stepped in float32 and rounded. With ``master_weights``, which needs ``capturable``, the optimizer keeps float32 copies of
    them. With ``capturable`` the count of steps is a tensor, else an ``int``.

    Raises:
        ConfigError: ``amsgrad``; ``master_weights`` without ``capturable``; a value is out of its range.
    """

    copied = ("adam_w_mode", "capturable", "master_weights")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        if master_weights and not capturable:
            raise ConfigError("master_weights=True needs capturable=True, as in apex; write both")
        self.set_grad_none, self.adam_w_mode = set_grad_none, adam_w_mode
        self.capturable, self.master_weights = capturable, master_weights
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    def rule(self, group: Mapping[str, Any]) -> AdamRule:
        correct = bool(group["bias_correction"])
        return AdamRule(decoupled=bool(self.adam_w_mode), correct=correct, step_scope="group")

    def has_master(self, parameter: Tensor) -> bool:
        """With ``master_weights``, every low parameter has a master."""
        return self.master_weights and is_low(parameter)


class FusedSGD(ApexOptimizer):
    """SGD with momentum; see :class:`halfpeak.fused.FusedSGD`. ``wd_after_momentum`` adds the weight decay after the momentum.

    ``lr`` is required unless every group has its own (ValueError). ``materialize_master_grads`` has no effect: gradients are
    shared with the masters. State per parameter: ``momentum_buffer``, if there is momentum.
    """

    copied = ("wd_after_momentum", "materialize_master_grads")

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        self.set_grad_none, self.wd_after_momentum = set_grad_none, wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening}
        super().__init__(params, {**defaults, "weight_decay": weight_decay, "nesterov": nesterov})

    def rule(self, group: Mapping[str, Any]) -> SGDRule:
        return SGDRule(
            momentum=group["momentum"] != 0, nesterov=bool(group["nesterov"]), late=self.wd_after_momentum
        )


class FusedLAMB(ApexOptimizer, fused.FusedLAMB):
    """LAMB; see :class:`halfpeak.fused.FusedLAMB`. ``max_grad_norm=0`` does not clip; in apex it stops all learning.

    State per parameter: ``exp_avg`` and ``exp_avg_sq``; per group: ``step``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        self.set_grad_none = set_grad_none
        super().__init__(
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
        return replace(super().rule(group), step_scope="group")


class FusedMixedPrecisionLamb(InternalMasters, FusedLAMB):
    """LAMB with masters of low parameters, for torch's gradient scaler; the learning rate of each group is a tensor.

    Args:
        step: the number of steps taken before.
        reduced_precision_dtype: parameters of this dtype get float32 masters.
    """

    copied = ("reduced_precision_dtype",)
    capturable = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
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
        super().__init__(
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
        """Add a group, with its own learning rate tensor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).clone()

    def has_master(self, parameter: Tensor) -> bool:
        """Every parameter of the reduced dtype has a master, unless that dtype is float32."""
        return parameter.dtype == self.reduced_precision_dtype != torch.float32


class FusedNovoGrad(ApexOptimizer, fused.FusedNovoGrad):
    """NovoGrad; see :class:`halfpeak.fused.FusedNovoGrad`. ``norm_type`` is 2, or 0 for the largest absolute value.

    In ``state_dict``, a parameter has ``exp_avg``, and a group has ``step`` and ``exp_avg_sq``: a tensor of the running
    norms of its low parameters, and a tensor of the running norms of its other parameters.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        if norm_type not in (0, 2):
            raise ConfigError(
                f"norm_type={short_repr(norm_type)} must be 2, or 0 for the largest absolute value"
            )
        self.set_grad_none = set_grad_none
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            reg_inside_moment=reg_inside_moment,
            grad_averaging=grad_averaging,
            norm_type=norm_type or math.inf,
            init_zero=init_zero,
        )

    def rule(self, group: Mapping[str, Any]) -> NovoGradRule:
        return replace(super().rule(group), step_scope="group")

    def state_dict(self) -> dict[str, Any]:
        """The state in apex's layout."""
        state = super().state_dict()
        state["state"] = {index: dict(row) for index, row in state["state"].items()}
        for group, own in zip(state["param_groups"], self.param_groups, strict=True):
            norms: tuple[list[Tensor], list[Tensor]] = ([], [])
            for index, parameter in zip(group["params"], own["params"], strict=True):
                row = state["state"].get(index, {})
                if "exp_avg_sq" in row:
                    norms[not is_low(parameter)].append(row.pop("exp_avg_sq"))
            if any(norms):
                group["exp_avg_sq"] = [
                    torch.stack(one) if one else torch.zeros(0, dtype=torch.float32) for one in norms
                ]
            group["norm_type"] = 0 if group["norm_type"] == math.inf else group["norm_type"]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state in apex's layout.

        Raises:
            StateError: a group has more or fewer norms than parameters with a state.
        """
        state = {index: dict(row) for index, row in state_dict["state"].items()}
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, own in zip(groups, self.param_groups, strict=False):
            group["norm_type"] = group["norm_type"] or math.inf
            if "exp_avg_sq" not in group:
                continue
            known = [pair for pair in zip(group["params"], own["params"], strict=False) if pair[0] in state]
            for norms, low in zip(group.pop("exp_avg_sq"), (True, False), strict=True):
                members = [index for index, parameter in known if is_low(parameter) == low]
                norms = torch.zeros(0, dtype=torch.float32) if norms is None else norms
                if len(norms) != len(members):
                    raise StateError(
                        f"exp_avg_sq holds {len(norms)} norms for {len(members)} {'low' if low else 'float32'} parameters "
                        "that have a state; load the state of this model's optimizer"
                    )
                for index, norm in zip(members, norms.unbind(), strict=True):
                    state[index]["exp_avg_sq"] = norm
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})


def _refuse_amsgrad(amsgrad: bool) -> None:
    if amsgrad:
        raise ConfigError(
            "amsgrad=True is not in apex's optimizers; use halfpeak.fused.FusedAdam(amsgrad=True)"
        )
