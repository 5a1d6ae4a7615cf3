"""What a road is: one way of running the two kernels of a step over pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from halfpeak.fused.layout import Piece
from halfpeak.fused.rules.base import Rule


class Reading(NamedTuple):
    """What one read of the gradients tells.

    Attributes:
        squares: the sum of squares of the true-sized gradients.  # f32[]
        found_inf: 1 if one of them is not finite.                 # f32[]
    """

    squares: Tensor
    found_inf: Tensor


class Order(NamedTuple):
    """One piece of an update.

    Attributes:
        piece: what is moved.
        rule: how.
        group: hyper-parameters.
        numbers: what gradients are multiplied by, then the rule's constants.  # f32[1 + k]
    """

    piece: Piece
    rule: Rule
    group: dict[str, object]
    numbers: Tensor


class Road(Protocol):
    """A way of running the kernels."""

    name: str

    def measure(self, pieces: Sequence[Piece], grads: Sequence[Tensor | None], factor: Tensor) -> Reading:
        """Read all gradients once."""
        ...

    def update(self, orders: Sequence[Order], grads: Sequence[Tensor | None]) -> None:
        """Move all weights once."""
        ...

    def forget(self) -> None:
        """The gradients change from here on."""
        ...

    def clear(self) -> None:
        """The blocks change from here on."""
        ...
