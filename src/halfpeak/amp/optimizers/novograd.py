"""``apex.optimizers.FusedNovoGrad``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfpeak import fused
from halfpeak.amp.optimizers.form import ApexForm, no_amsgrad
from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import ConfigError, StateError
from halfpeak.fused.rules.novograd import NovoGradRule


class FusedNovoGrad(ApexForm, fused.FusedNovoGrad):
    """NovoGrad; see :class:`halfpeak.fused.FusedNovoGrad`, which has the same arguments, but for ``norm_type``.

    In ``state_dict``, a parameter has ``exp_avg``, and a group ``step`` and ``exp_avg_sq``: the running norms of its
    low parameters, and of the others.

    Args:
        norm_type: 2, or 0 for the largest absolute value.

    Raises:
        ConfigError: ``amsgrad``; a value out of its range.
    """

    kept = (*ApexForm.kept, "reg_inside_moment")

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
            raise ConfigError(f"norm_type={norm_type!r} must be 2, or 0 for the largest absolute value")
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
        """The rule by which a group is stepped."""
        return replace(super().rule(group), per_group=True)

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
                group["exp_avg_sq"] = [torch.stack(one) if one else torch.zeros(0) for one in norms]
            group["norm_type"] = 0 if group["norm_type"] == math.inf else group["norm_type"]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state in apex's layout.

        Raises:
            StateError: a group has not one norm for each parameter that has a state.
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
                norms = torch.zeros(0) if norms is None else norms
                if len(norms) != len(members):
                    raise StateError(
                        f"exp_avg_sq holds {len(norms)} norms for {len(members)} {'low' if low else 'float32'} parameters "
                        "that have a state; load the state of this model's optimizer"
                    )
                for index, norm in zip(members, norms.unbind(), strict=True):
                    state[index]["exp_avg_sq"] = norm
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})
