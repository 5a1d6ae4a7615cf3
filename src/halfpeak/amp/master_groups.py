"""MasterGroups: the parameters and masters of an optimizer in the per-group lists that scripts for apex read."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from halfpeak.state.masters import Masters


class MasterGroups:
    """Three lists of lists, read at each access from the optimizer's groups, which hold the masters."""

    def __init__(self, optimizer: Optimizer, masters: Masters) -> None:
        self.optimizer = optimizer
        self._masters = masters

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The low-precision (float16 or bfloat16) model parameters that have a master."""
        return [[low for _, low in group if low is not None] for group in self._pairs()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of the parameters in :attr:`fp16_groups`, in the same order."""
        return [[p for p, low in group if low is not None] for group in self._pairs()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The trainable parameters without a master."""
        return [[p for p, low in group if low is None and p.requires_grad] for group in self._pairs()]

    def _pairs(self) -> list[list[tuple[Tensor, Tensor | None]]]:
        groups = self.optimizer.param_groups
        return [[(p, self._masters.low_of(p)) for p in group["params"]] for group in groups]
