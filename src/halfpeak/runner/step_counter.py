"""StepCounter: how many iterations changed the parameters, and how many were lost with a skipped step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from halfpeak.core.state_checks import Schema, require, require_count
from halfpeak.core.step_result import StepResult

STEP_COUNTS: Final[Schema] = {"steps": require_count, "lost": require_count}
"""The state of a :class:`StepCounter`."""


class StepCounter:
    """Counts the steps that optimizers took, and the iterations whose gradients a skipped step dropped.

    A skipped step drops its whole accumulation window. The counter reads a result when user code asks for a count or
    when the next result arrives, so recording a result does not wait for its own step.

    >>> import torch
    >>> counter = StepCounter()
    >>> for number, overflow in enumerate([0.0, 1.0, 0.0]):
    ...     counter.record(number, StepResult(torch.tensor(overflow), torch.tensor(1.0)))
    >>> counter.read_steps(), counter.read_lost()
    (2, 1)
    """

    def __init__(self) -> None:
        self._steps = self._lost = self._window = 0
        self._recorded = -1
        self._unread: tuple[StepResult, int] | None = None

    def record(self, iteration: int, result: StepResult | None) -> None:
        """Record the result of an iteration, once; None counts as a step, because no hook reported one."""
        if iteration == self._recorded:
            return
        self._read()
        self._recorded = iteration
        self._window += 1
        if result is not None and not result.boundary:
            return
        if result is None:
            self._steps += 1
        else:
            self._unread = (result, self._window)
        self._window = 0

    def read_steps(self) -> int:
        """Steps that changed the parameters. Waits for the device."""
        self._read()
        return self._steps

    def read_lost(self) -> int:
        """Iterations whose gradients skipped steps dropped. Waits for the device."""
        self._read()
        return self._lost

    def state_dict(self) -> dict[str, Any]:
        """The counts. Waits for the device."""
        self._read()
        return {"steps": self._steps, "lost": self._lost}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            StateError: it is something else. Nothing was loaded.
        """
        require(state, "state", STEP_COUNTS)
        self._unread, self._recorded = None, -1
        self._steps, self._lost, self._window = state["steps"], state["lost"], 0

    def _read(self) -> None:
        if self._unread is None:
            return
        (result, window), self._unread = self._unread, None
        if result.stepped():
            self._steps += 1
        else:
            self._lost += window
