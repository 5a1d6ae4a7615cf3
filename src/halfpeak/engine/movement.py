"""Movement: whether a step that an exception ended had moved the optimizer's parameters by then."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from halfpeak.fused.optimizer import FusedOptimizer

_Mark = tuple[int, int | None]


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
        self._marks = [(t, _mark(optimizer, t)) for t in moving] if self._moves is None else []

    def has_happened(self, optimizer: Optimizer) -> bool:
        """Whether the step got as far as the optimizer's own code and through it; also where there was nothing to do."""
        changed = (_mark(optimizer, target) != mark for target, mark in self._marks)
        return self._is_idle or _moves(optimizer) != self._moves or any(changed)


def _moves(optimizer: Optimizer) -> int | None:
    """How often a fused optimizer has moved; None for any other."""
    return optimizer.moves if isinstance(optimizer, FusedOptimizer) else None


def _mark(optimizer: Optimizer, target: Tensor) -> _Mark:
    """What changes when an optimizer moves a parameter: its version, or with torch's fused kernels that of its step."""
    step = optimizer.state.get(target, {}).get("step")
    return target._version, step._version if isinstance(step, Tensor) else step
