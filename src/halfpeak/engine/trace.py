"""Trace: notices when somebody zeroes or replaces gradients that a lane has written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Trace:
    """The gradients that a lane has written, as they were then.

    While low gradients wait scaled, a zero lies as the gradient of one master. ``optimizer.zero_grad()`` reaches masters
    only: that it took or wrote this zero is how it is noticed.

    Attributes:
        marker: the master whose gradient is that zero, or None.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, Tensor, int]] = []
        self.marker: Tensor | None = None

    def keep(self, targets: Iterable[Tensor]) -> None:
        """Remember the gradients of ``targets`` as they are now."""
        self._seen = [(t, t.grad, t.grad._version) for t in targets if t.grad is not None]

    def claimed(self) -> list[Tensor]:
        """The parameters whose gradients are remembered."""
        return [target for target, _, _ in self._seen]

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
        return all(target.grad is grad and grad._version == version for target, grad, version in self._seen)

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()
        self.marker = None
