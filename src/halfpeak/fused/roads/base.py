"""What a road is: one way of running the two kernels of a step over pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from halfpeak.fused.books import Account, Books
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


class Moves(NamedTuple):
    """A whole step whose numbers the host does not know.

    Attributes:
        pieces: what is moved.
        groups: hyper-parameters.
        grads: of all parameters.
        factor: what gradients are multiplied by.                       # f32[]
        found_inf: anything but zero keeps all as it is; None is zero.  # f32[]
        limit: the largest norm of all gradients times ``factor``; they are clipped to it. None does not clip.
    """

    pieces: Sequence[Piece]
    groups: Sequence[dict[str, Any]]
    grads: Sequence[Tensor | None]
    factor: Tensor
    found_inf: Tensor | None
    limit: float | None = None


class DeviceRoad(ABC):
    """A way of running the kernels on a device that nobody waits for: step counts and skips are data there."""

    name: str

    @abstractmethod
    def measure(self, pieces: Sequence[Piece], grads: Sequence[Tensor | None], factor: Tensor) -> Reading:
        """Read all gradients once."""

    @abstractmethod
    def move(self, moves: Moves) -> None:
        """Move all weights once and count the step, or do neither."""

    def account(self, moves: Moves, books: Books) -> Account | None:
        """Read all gradients once, decide, and write down what follows; None where there is no kernel for that."""
        return None

    @abstractmethod
    def forget(self) -> None:
        """The gradients change from here on."""

    @abstractmethod
    def clear(self) -> None:
        """The blocks change from here on."""
