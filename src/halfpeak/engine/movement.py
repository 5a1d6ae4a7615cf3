"""Movement: whether a step that an exception ended had moved the optimizer's parameters by then."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from halfpeak.fused.optimizer import FusedOptimizer

_Mark = tuple[int, int | None]


class Movement:
    """What an optimizer's parameters looked like before a step.

    Args:
        optimizer: about to step.
        targets: the parameters that it is to move.
    """

    def __init__(self, optimizer: Optimizer, targets: Iterable[Tensor]) -> None:
        # A run is found through its optimizer, held weakly: whatever it keeps must not keep the optimizer.
        self._optimizer = weakref.ref(optimizer)
        self._moves = optimizer.moves if isinstance(optimizer, FusedOptimizer) else None
        self._marks = [] if self._moves is not None else [(t, _mark(optimizer, t)) for t in targets]

    def has_happened(self) -> bool:
        """Whether the step got as far as the optimizer's own code and through it; also where there was nothing to do."""
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        if isinstance(optimizer, FusedOptimizer):
            return optimizer.moves != self._moves
        changed = (_mark(optimizer, target) != mark for target, mark in self._marks)
        return not self._marks or any(changed)


def _mark(optimizer: Optimizer, target: Tensor) -> _Mark:
    """What changes when an optimizer moves a parameter: its version, or with torch's fused kernels that of its step."""
    step = optimizer.state.get(target, {}).get("step")
    return target._version, step._version if isinstance(step, Tensor) else step
