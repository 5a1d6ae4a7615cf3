"""``apex.optimizers.FusedSGD``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfpeak.amp.optimizers.form import ApexForm
from halfpeak.fused.optimizer import Feed
from halfpeak.fused.rules.sgd import SGDRule


class FusedSGD(ApexForm):
    """SGD with momentum; see :class:`halfpeak.fused.rules.sgd.SGDRule`.

    State per parameter: ``momentum_buffer``, if there is momentum.

    Args:
        params: parameters or groups.
        lr: learning rate.
        momentum: what is left of the buffer at each step.
        dampening: what is left out of a gradient that enters the buffer; the first enters whole.
        weight_decay: weight decay.
        nesterov: Nesterov's momentum.
        wd_after_momentum: add the weight decay after the momentum.
        materialize_master_grads: no effect here: a fused optimizer reads low gradients where they lie in any case.
        set_grad_none: :meth:`zero_grad` drops gradients.

    Attributes:
        most_recent_scale: what the gradients of the next step are divided by; 1 again after it.
        scale_set_by_backward: whether somebody has set it.

    Raises:
        ConfigError: a value out of its range.
    """

    kept = (
        *ApexForm.kept,
        "wd_after_momentum",
        "materialize_master_grads",
        "most_recent_scale",
        "scale_set_by_backward",
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
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
        """The rule by which a group is stepped."""
        return SGDRule(
            momentum=group["momentum"] != 0, nesterov=bool(group["nesterov"]), late=self.wd_after_momentum
        )

    def _move(self, feed: Feed, found_inf: Tensor | None = None) -> None:
        super()._move(feed._replace(factor=feed.factor / self.most_recent_scale), found_inf)
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
