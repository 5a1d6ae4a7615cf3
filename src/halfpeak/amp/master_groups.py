"""MasterGroups: the parameters and masters of an optimizer in the per-group lists that scripts for apex read."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from halfpeak.parts.pairs import Pairs


class MasterGroups:
    """Three lists of lists, read at each access from the optimizer's groups, which hold the masters."""

    def __init__(self, optimizer: Optimizer, pairs: Pairs) -> None:
        self.optimizer = optimizer
        self._pairs = pairs

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The trainable low-precision (float16 or bfloat16) model parameters."""
        return [[self._pairs.weight_of(master) for master in group] for group in self.fp32_from_fp16_groups]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of the parameters in :attr:`fp16_groups`, in the same order."""
        return self._trainable(with_master=True)

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The trainable parameters without a master."""
        return self._trainable(with_master=False)

    def _trainable(self, *, with_master: bool) -> list[list[Tensor]]:
        return [
            [
                p
                for p in group["params"]
                if p.requires_grad and (self._pairs.weight_of(p) is not p) == with_master
            ]
            for group in self.optimizer.param_groups
        ]
