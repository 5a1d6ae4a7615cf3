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
        self._marks = _marks(optimizer, self._moving)

    def has_happened(self, optimizer: Optimizer) -> bool:
        """Whether the step got as far as the optimizer's own code and through it; also where there was nothing to do."""
        return (
            self._is_idle
            or _moves(optimizer) != self._moves
            or _marks(optimizer, self._moving) != self._marks
        )


def _moves(optimizer: Optimizer) -> int | None:
    """How often a fused optimizer has moved; None for any other."""
    return optimizer.moves if isinstance(optimizer, FusedOptimizer) else None


def _marks(optimizer: Optimizer, moving: Sequence[Tensor]) -> tuple[list[int], list[object]]:
    """What changes when an optimizer moves parameters: their versions, or with torch's fused kernels those of steps.

    States are gone through, not looked up: a lookup by tensor costs more than all else here.
    """
    states = optimizer.state.values() if moving else ()
    steps = [state.get("step") for state in states if isinstance(state, dict)]  # pyright: ignore
    return list(map(_VERSION, moving)), [s._version if isinstance(s, Tensor) else s for s in steps]


_VERSION: Final = attrgetter("_version")
