"""Roster: who takes part in the steps of an optimizer, looked up once for as long as nobody comes or goes."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Final

from torch import Tensor
from torch.optim import Optimizer

from halfpeak.engine.slots import Slot, Slots
from halfpeak.parts.masters import Masters, targets_of

_TRAINABLE: Final = attrgetter("requires_grad")


class Roster:
    """The parameters of an optimizer as they were when it was made.

    Attributes:
        targets: for each parameter in the groups, in order, what holds its true-sized gradient: a master, itself, or what
            stands in for a master.
        sources: for each, the low parameter that it is a master of, or itself.
        everyone: all of them, each once.
        slots: those that are trainable.
        smallest_master: of the trainable ones, or None.
    """

    def __init__(self, optimizer: Optimizer, masters: Masters) -> None:
        self._members = targets_of(optimizer)
        self.sources = [masters.source_of(member) for member in self._members]
        ends = map(masters.of, self.sources)
        self.targets = [m if end is None else end for m, end in zip(self._members, ends, strict=True)]
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._flags = list(map(_TRAINABLE, self.sources))
        pairs = map(Slot, self.sources, self.targets)
        self.everyone = list({id(slot.source): slot for slot in pairs}.values())
        self.slots = Slots(slot for slot in self.everyone if slot.source.requires_grad)
        self.smallest_master = min(self.slots.highs, key=Tensor.numel, default=None)

    def slots_of(self, window: Slots | None) -> Slots:
        """The trainable parameters, and those frozen inside a window whose gradients belong to it."""
        if window is None or window is self.slots:
            return self.slots
        known = {id(slot.source) for slot in self.slots}
        beyond = [s for s in window if id(s.source) not in known and s.has_gradient()]
        return Slots([*self.slots, *beyond]) if beyond else self.slots

    def ends_beyond(self, window: Slots | None) -> list[Tensor]:
        """Sources and targets of a window that began with another roster."""
        return [] if window is None or window is self.slots else [*window.sources, *window.targets]

    def is_current(self, optimizer: Optimizer) -> bool:
        """Whether the same parameters stand in the groups and the same of them are trainable."""
        groups = [group["params"] for group in optimizer.param_groups]
        return (
            list(map(len, groups)) == self._sizes
            and all(map(is_, chain.from_iterable(groups), self._members))
            and list(map(_TRAINABLE, self.sources)) == self._flags
        )
