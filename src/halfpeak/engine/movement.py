"""Movement: whether a step that an exception ended had moved the optimizer's parameters by then."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from torch import Tensor
from torch.optim import Optimizer

from halfpeak.fused.optimizer import FusedOptimizer


class Movement:
    """What an optimizer's parameters looked like before a step.

    Args:
        optimizer: about to step.
        moving: the parameters that have a gradient.
        is_fed: whether it reads gradients that lie elsewhere.
    """

    def __init__(self, optimizer: Optimizer, moving: Sequence[Tensor], *, is_fed: bool) -> None:
        self._is_idle = not moving and not is_fed
        self._moves = _moves(optimizer)
        self._moving = list(moving) if self._moves is None else []
        self._stepping = _first_of_each_group(optimizer) if self._moving else []
        self._marks = self._look(optimizer)

    def has_happened(self, optimizer: Optimizer) -> bool:
        """Whether the step got as far as the optimizer's own code and through it; also where there was nothing to do."""
        return self._is_idle or _moves(optimizer) != self._moves or self._look(optimizer) != self._marks

    def _look(self, optimizer: Optimizer) -> tuple[list[int], list[object]]:
        """What changes when an optimizer moves parameters: their versions, or with torch's fused kernels those of steps.

        Such a kernel is given a group as a whole, so one look into its state tells.
        """
        steps = [optimizer.state.get(parameter, {}).get("step") for parameter in self._stepping]
        versions = list(map(_VERSION, self._moving))
        return versions, [step._version if isinstance(step, Tensor) else step for step in steps]


def _moves(optimizer: Optimizer) -> int | None:
    """How often a fused optimizer has moved; None for any other."""
    return optimizer.moves if isinstance(optimizer, FusedOptimizer) else None


def _first_of_each_group(optimizer: Optimizer) -> list[Tensor]:
    """The first parameter with a gradient."""
    firsts = (
        next((p for p in group["params"] if p.grad is not None), None) for group in optimizer.param_groups
    )
    return [parameter for parameter in firsts if parameter is not None]


_VERSION: Final = attrgetter("_version")
