"""``apex.optimizers.FusedAdagrad``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfpeak.amp.optimizers.form import ApexForm
from halfpeak.fused.rules.adagrad import AdagradRule


class FusedAdagrad(ApexForm):
    """Adagrad; see :class:`halfpeak.fused.rules.adagrad.AdagradRule`.

    State per parameter: ``sum``.

    Args:
        params: parameters or groups.
        lr: learning rate.
        eps: what is added to the root of the sum of squares.
        weight_decay: weight decay.
        set_grad_none: :meth:`zero_grad` drops gradients.
        adagrad_w_mode: decay beside the gradient, as in AdamW.

    Raises:
        ConfigError: a value out of its range.
    """

    kept = (*ApexForm.kept, "adagrad_w_mode")

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
        """The rule by which a group is stepped."""
        return AdagradRule(decoupled=bool(self.adagrad_w_mode), counts=False)
