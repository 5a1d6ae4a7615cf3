"""FusedLAMB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfpeak.fused.layout import Piece
from halfpeak.fused.optimizer import Feed, FusedOptimizer
from halfpeak.fused.roads.base import DeviceRoad, Moves
from halfpeak.fused.roads.choose import RoadName
from halfpeak.fused.rules.lamb import LAMBRule


class FusedLAMB(FusedOptimizer):
    """LAMB for large batches; see :class:`~halfpeak.fused.rules.lamb.LAMBRule` for the rule.

    The gradients of all groups together are clipped to ``max_grad_norm`` first.

    Args:
        params: parameters or groups, dense, real, floating point.
        lr: learning rate: a number or a tensor of one element.
        bias_correction: correct the moments for their start at zero.
        betas: how much of the first and of the second moment is kept.
        eps: what is added to the root of the second moment.
        weight_decay: how much of the weight is taken away, within the step that is then rescaled.
        adam_w_mode: decay beside the gradient; False adds it to the gradient.
        grad_averaging: a gradient enters the first moment by ``1 - beta1``; False lets it enter whole.
        max_grad_norm: the largest norm of all gradients; 0 does not clip. It is one for all groups.
        use_nvlamb: rescale the step of groups without weight decay too.
        maximize: go up instead of down.
        road: how kernels run.

    Raises:
        ConfigError: a value is out of its range.
        ParameterError: a parameter is not dense, real and floating point.

    Example:
        >>> weight = torch.nn.Parameter(torch.full((4,), 2.0))
        >>> optimizer = FusedLAMB([weight], lr=0.1, use_nvlamb=True, weight_decay=0.0)
        >>> weight.grad = torch.tensor([1.0, -2.0, 3.0, -4.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([1.8000, 2.2000, 1.8000, 2.2000])
    """

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
        maximize: bool = False,
        road: RoadName = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "maximize": maximize,
        }
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        super().__init__(params, defaults, road=road)

    def rule(self, group: Mapping[str, Any]) -> LAMBRule:
        """The rule by which a group is stepped."""
        return LAMBRule(
            decoupled=self.adam_w_mode,
            average=bool(group["grad_averaging"]),
            correct=bool(group["bias_correction"]),
            trusts=self.use_nvlamb or group["weight_decay"] != 0,
        )

    def _moves(self, pieces: Sequence[Piece], feed: Feed, found_inf: Tensor | None) -> Moves:
        limit = self.defaults["max_grad_norm"]
        return super()._moves(pieces, feed, found_inf)._replace(limit=limit or None)

    def _move(self, feed: Feed, found_inf: Tensor | None = None) -> None:
        limit, known = self.defaults["max_grad_norm"], self._measured
        if limit:
            pieces = self._pieces(feed) if known is None or known[0] is not feed.grads else known[1]
            self._measured = (feed.grads, pieces)
            road = self._road_for(pieces) if pieces else None
            # A device road clips by itself.
            if road is not None and not isinstance(road, DeviceRoad):
                norm = road.measure(pieces, feed.grads, feed.factor).squares.sqrt()
                feed = feed._replace(factor=feed.factor * torch.where(norm > limit, limit / norm, 1.0))
        super()._move(feed, found_inf)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "adam_w_mode": self.adam_w_mode, "use_nvlamb": self.use_nvlamb}
