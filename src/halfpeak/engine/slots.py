"""What a lane is made of: where gradients are written and read, where they stand, and who answers for a step."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from halfpeak.engine.lane import Lane


class Phase(enum.Enum):
    """Where the gradients of a window stand."""

    CLEAN = "no gradients of a window are held"
    SCALED = "gradients lie scaled where autograd left them"
    DEFERRED = "gradients lie scaled where autograd left them, for the step of a fused optimizer to read"
    UNSCALED = "gradients lie true-sized where the optimizer reads them"


class Slot(NamedTuple):
    """Autograd writes ``source.grad``; the optimizer reads ``target.grad``. Without a master both are one tensor."""

    source: Tensor
    target: Tensor

    def has_gradient(self) -> bool:
        """Whether one lies at either end."""
        return self.source.grad is not None or self.target.grad is not None


def target_gradients(slots: Iterable[Slot]) -> list[Tensor]:
    """The gradients that lie where an optimizer reads them."""
    return [grad for grad in map(_TARGET_GRAD, slots) if grad is not None]


_TARGET_GRAD: Final = attrgetter("target.grad")


class Owner(Protocol):
    """What a lane asks when its optimizer is stepped."""

    steps_itself: bool
    """Whether an engine alone calls ``optimizer.step()``, and a call by anyone else is a mistake."""

    def decide(self, lane: Lane, *, has_closure: bool) -> bool:
        """The verdict for a step that the caller began: skip it or not."""
        ...

    def finished(self, lane: Lane, verdict: Tensor | bool) -> None:
        """The step is over."""
        ...

    def closure_failed(self, lane: Lane) -> None:
        """A closure's gradients were not finite; it is about to be called again."""
        ...

    def closure_passed(self, lane: Lane) -> None:
        """A closure's gradients are finite and about to be used."""
        ...
