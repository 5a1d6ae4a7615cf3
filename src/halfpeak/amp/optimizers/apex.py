"""The classes of ``apex.optimizers``: fused optimizers with apex's arguments, defaults and state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from halfpeak import fused
from halfpeak.amp.optimizers.internal_masters import ApexStateLayout, InternalMasters, no_amsgrad
from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import ConfigError, StateError
from halfpeak.core.short_repr import short_repr
from halfpeak.fused.decision import StepInputs
from halfpeak.fused.rules.adagrad import AdagradRule
from halfpeak.fused.rules.adam import AdamRule
from halfpeak.fused.rules.lamb import LAMBRule
from halfpeak.fused.rules.novograd import NovoGradRule
from halfpeak.fused.rules.sgd import SGDRule


class FusedAdagrad(ApexStateLayout):
    """Adagrad; see :class:`halfpeak.fused.rules.adagrad.AdagradRule`.

    State per parameter: ``sum``.

    Args:
        params: parameters or groups.
        eps: added to the root of the sum of squares.
        set_grad_none: :meth:`zero_grad` drops gradients.
        adagrad_w_mode: decoupled weight decay, as in AdamW.

    Raises:
        ConfigError: a value is out of its range.
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
        self.set_grad_none = set_grad_none
        self.adagrad_w_mode = int(adagrad_w_mode)
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def rule(self, group: Mapping[str, Any]) -> AdagradRule:
        return AdagradRule(decoupled=bool(self.adagrad_w_mode), step_scope="nowhere")


class FusedAdam(InternalMasters):
    """Adam, or AdamW with ``adam_w_mode``, which is on by default; see :class:`halfpeak.fused.rules.adam.AdamRule`.

    State per parameter: ``exp_avg`` and ``exp_avg_sq``, in float32; per group: ``step``. Low-precision parameters are
    stepped in float32 and rounded. The other arguments are those of :class:`halfpeak.fused.FusedAdam`.

    Args:
        bias_correction: correct the moments for their start at zero.
        adam_w_mode: decoupled weight decay.
        amsgrad: not supported; raises ConfigError.
        set_grad_none: :meth:`zero_grad` drops gradients.
        capturable: no effect here.
        master_weights: step float32 copies of low parameters. Needs ``capturable``.

    Raises:
        ConfigError: ``amsgrad``; ``master_weights`` without ``capturable``; a value is out of its range.
    """

    copied = ("adam_w_mode", "capturable", "master_weights")

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
        correct = bool(group["bias_correction"])
        return AdamRule(decoupled=bool(self.adam_w_mode), correct=correct, step_scope="group")

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: object = None,
        output_params: object = None,
        scale: object = None,
        grad_norms: object = None,
        **others: Any,
    ) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it.
            grads: raises ConfigError, like the next three; ``apex.contrib.optimizers.FusedAdam`` takes them.
            output_params: raises ConfigError.
            scale: raises ConfigError.
            grad_norms: raises ConfigError.
            others: ``grad_scaler``, whose scale divides the gradients; a step with a non-finite gradient is skipped.

        Raises:
            ConfigError: an argument of the older form.
        """
        given = {"grads": grads, "output_params": output_params, "scale": scale, "grad_norms": grad_norms}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is an argument of apex.contrib.optimizers.FusedAdam.step; use that class, or leave it out"
                )
        return super().step(closure, **others)

    def has_master(self, parameter: Tensor) -> bool:
        """With ``master_weights``, every low parameter has a master."""
        return self.master_weights and is_low(parameter)


class FusedSGD(ApexStateLayout):
    """SGD with momentum; see :class:`halfpeak.fused.FusedSGD`, which explains the other arguments.

    State per parameter: ``momentum_buffer``, if there is momentum.

    Args:
        lr: learning rate; required unless every group has its own.
        wd_after_momentum: add the weight decay after the momentum.
        materialize_master_grads: no effect here: a fused optimizer always reads low gradients in place.
        set_grad_none: :meth:`zero_grad` drops gradients.

    Attributes:
        most_recent_scale: divides the gradients of the next step, which resets it to 1.
        scale_set_by_backward: whether ``most_recent_scale`` was set; the step resets it.

    Raises:
        ConfigError: a value is out of its range.
        ValueError: a group without ``lr``, and no default.
    """

    copied = (
        "wd_after_momentum",
        "materialize_master_grads",
        "most_recent_scale",
        "scale_set_by_backward",
    )

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
        self.set_grad_none = set_grad_none
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    def rule(self, group: Mapping[str, Any]) -> SGDRule:
        return SGDRule(
            momentum=group["momentum"] != 0, nesterov=bool(group["nesterov"]), late=self.wd_after_momentum
        )

    def _update(self, inputs: StepInputs, found_inf: Tensor | None = None) -> None:
        super()._update(inputs._replace(multiplier=inputs.multiplier / self.most_recent_scale), found_inf)
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False


class FusedLAMB(ApexStateLayout, fused.FusedLAMB):
    """LAMB; see :class:`halfpeak.fused.FusedLAMB`, which has the same arguments.

    State per parameter: ``exp_avg`` and ``exp_avg_sq``; per group: ``step``. ``max_grad_norm=0`` does not clip; in apex
    it stops all learning.

    Raises:
        ConfigError: ``amsgrad``; a value is out of its range.
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
        return replace(super().rule(group), step_scope="group")


class FusedMixedPrecisionLamb(InternalMasters, FusedLAMB):
    """LAMB with masters of low parameters; learning rate and step count are tensors, for torch's gradient scaler.

    Args:
        params: parameters or groups.
        lr: learning rate; each group gets its own tensor.
        step: the number of steps taken before.
        reduced_precision_dtype: parameters of this dtype get float32 masters.

    The other arguments are those of :class:`FusedLAMB`.

    Raises:
        ConfigError: ``amsgrad``; a value is out of its range.
    """

    copied = ("reduced_precision_dtype",)

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
        """Add a group, with its own learning rate tensor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).clone()

    def has_master(self, parameter: Tensor) -> bool:
        """Every parameter of the reduced dtype has a master, unless that dtype is float32."""
        return parameter.dtype == self.reduced_precision_dtype != torch.float32


class FusedNovoGrad(ApexStateLayout, fused.FusedNovoGrad):
    """NovoGrad; see :class:`halfpeak.fused.FusedNovoGrad`, which has the same arguments except for ``norm_type``.

    In ``state_dict``, a parameter has ``exp_avg``, and a group has ``step`` and ``exp_avg_sq``: a tensor of the running
    norms of its low parameters, and a tensor of the running norms of its other parameters.

    Args:
        norm_type: 2, or 0 for the largest absolute value.

    Raises:
        ConfigError: ``amsgrad``; a value is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        no_amsgrad(amsgrad)
        if norm_type not in (0, 2):
            raise ConfigError(
                f"norm_type={short_repr(norm_type)} must be 2, or 0 for the largest absolute value"
            )
        self.set_grad_none = set_grad_none
        fused.FusedNovoGrad.__init__(
            self,
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
