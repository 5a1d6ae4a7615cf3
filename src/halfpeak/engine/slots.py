"""What a lane is made of: where gradients are written and read, where they stand, and who answers for a step."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from itertools import compress, repeat
from operator import attrgetter, is_not
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


class Slots(list[Slot]):
    """Some slots, never changed once made, and their ends as lists: a step goes through these in loops that run in C.

    Attributes:
        sources: of all.
        targets: of all.
        plain: parameters without a master.
        lows: parameters with one.
        highs: their masters, or what stands in for these.
    """

    def __init__(self, slots: Iterable[Slot] = ()) -> None:
        super().__init__(slots)
        self.sources = [slot.source for slot in self]
        self.targets = [slot.target for slot in self]
        self.plain = [slot.source for slot in self if slot.source is slot.target]
        self.lows = [slot.source for slot in self if slot.source is not slot.target]
        self.highs = [slot.target for slot in self if slot.source is not slot.target]

    def gradients(self) -> list[Tensor]:
        """Those that lie where the optimizer reads them."""
        return [grad for grad in map(_GRAD, self.targets) if grad is not None]

    def with_gradient(self) -> list[Tensor]:
        """The targets that have a gradient."""
        grads = map(_GRAD, self.targets)
        return list(compress(self.targets, map(is_not, grads, repeat(None))))


_GRAD: Final = attrgetter("grad")


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
