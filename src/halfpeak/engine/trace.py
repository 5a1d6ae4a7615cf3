"""Trace: notices when somebody zeroes or replaces gradients that a lane has written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import Final

import torch
from torch import Tensor

_GRAD: Final = attrgetter("grad")
_VERSION: Final = attrgetter("_version")


class Trace:
    """The gradients that a lane has written, as they were then.

    While low gradients wait scaled, a zero lies as the gradient of one master. ``optimizer.zero_grad()`` reaches masters
    only: that it took or wrote this zero is how it is noticed.

    Attributes:
        marker: the master whose gradient is that zero, or None.
    """

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._grads: list[Tensor | None] = []
        self._written: list[Tensor] = []
        self._versions: list[int] = []
        self.marker: Tensor | None = None

    def keep(self, targets: Iterable[Tensor]) -> None:
        """Remember the gradients of ``targets`` as they are now."""
        self._targets = list(targets)
        self._grads = list(map(_GRAD, self._targets))
        self._written = [grad for grad in self._grads if grad is not None]
        self._versions = list(map(_VERSION, self._written))

    def claimed(self) -> list[Tensor]:
        """The parameters whose gradients are remembered."""
        return self._targets

    def lay(self, master: Tensor | None) -> None:
        """Lay a marker, where there is a master to lay it on."""
        self.marker = master
        if master is not None:
            master.grad = torch.zeros_like(master)
            self.keep([master])

    def lift(self) -> bool:
        """Take the marker away, if every gradient is as it was; whether that is so."""
        untouched = self.is_untouched()
        if untouched and self.marker is not None:
            self.marker.grad = None
            self.marker = None
        return untouched

    def is_untouched(self) -> bool:
        """Whether every gradient is as it was."""
        now = list(map(_GRAD, self._targets))
        return all(map(is_, now, self._grads)) and list(map(_VERSION, self._written)) == self._versions

    def known(self, targets: Sequence[Tensor]) -> list[Tensor | None] | None:
        """The gradients of ``targets`` as they were, if these are the first that it knows; else None."""
        if len(targets) > len(self._targets) or not all(map(is_, targets, self._targets)):
            return None
        return self._grads[: len(targets)]

    def touched(self) -> list[Tensor | None]:
        """What has become of the gradients that are not as they were."""
        if self.is_untouched():
            return []
        versions = iter(self._versions)
        known = [(grad, None if grad is None else next(versions)) for grad in self._grads]
        return [
            target.grad
            for target, (grad, version) in zip(self._targets, known, strict=True)
            if target.grad is not grad or (grad is not None and grad._version != version)
        ]

    def clear(self) -> None:
        """Forget everything."""
        self.keep(())
        self.marker = None
