"""Progress: which iterations moved the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfpeak.core.outcome import StepResult


class Progress:
    """Counts the steps that optimizers took, and the iterations whose gradients were thrown away with a skipped step.

    A skipped step takes its whole accumulation window along. The result of an iteration is read when somebody asks, or
    when the next one comes: nothing waits for a step that has only just begun.

    >>> import torch
    >>> progress = Progress()
    >>> for number, overflow in enumerate([0.0, 1.0, 0.0]):
    ...     progress.note(number, StepResult(torch.tensor(overflow), torch.tensor(1.0)))
    >>> progress.read_steps(), progress.read_lost()
    (2, 1)
    """

    def __init__(self) -> None:
        self._steps = self._lost = self._window = 0
        self._noted = -1
        self._unread: tuple[StepResult, int] | None = None

    def note(self, iteration: int, result: StepResult | None) -> None:
        """Take the result of an iteration, once; None where nobody told, which counts as a step."""
        if iteration == self._noted:
            return
        self._settle()
        self._noted = iteration
        self._window += 1
        if result is None:
            self._steps += 1
        elif not result.boundary:
            return
        else:
            self._unread = (result, self._window)
        self._window = 0

    def read_steps(self) -> int:
        """Steps in which the optimizer moved. Waits for the device."""
        self._settle()
        return self._steps

    def read_lost(self) -> int:
        """Iterations whose gradients were thrown away. Waits for the device."""
        self._settle()
        return self._lost

    def state_dict(self) -> dict[str, Any]:
        """The counts. Waits for the device."""
        self._settle()
        return {"steps": self._steps, "lost": self._lost, "window": self._window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._unread, self._noted = None, -1
        self._steps, self._lost, self._window = state["steps"], state["lost"], state["window"]

    def _settle(self) -> None:
        if self._unread is None:
            return
        (result, window), self._unread = self._unread, None
        if result.stepped():
            self._steps += 1
        else:
            self._lost += window
