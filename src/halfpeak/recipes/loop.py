"""Loop: runs the steps, validations and checkpoints of a training until it is over or is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from halfpeak.insight.history import History, Row
from halfpeak.recipes.training import Step, Training

PATIENCE = 1.0
"""Seconds after which the results of steps are read even if fewer than ``log_every`` steps have passed."""


class Reporter(Protocol):
    """Shows the progress of a run, as a display or as lines of text."""

    def rows(self, rows: Sequence[Row], speed: float) -> None:
        """Show steps whose results have just been read, and their speed in units per second."""
        ...

    def validated(self, row: Row) -> None:
        """Show a validation."""
        ...


class Loop:
    """Drives a training to its last step.

    Only steps count as training time, not validations, checkpoints and the waits for them.

    Args:
        save: writes a checkpoint of the training.
        stop: called after each step; if it returns True, the run saves and ends.
    """

    def __init__(
        self,
        training: Training,
        history: History,
        reporter: Reporter,
        *,
        save: Callable[[], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._training, self._history, self._reporter = training, history, reporter
        self._save, self._stop = save, stop
        self._last_read = 0.0

    def run(self) -> Row | None:
        """Run to the end and return the last validation; None if ``stop`` ended the run before its last step."""
        training, config = self._training, self._training.config
        total = config.steps or 0
        validation: Row | None = None
        self._last_read = time.perf_counter()
        while training.step < total:
            self._record(training.advance())
            over = training.step >= total
            validates = over or _is_due(training.step, config.eval_every)
            if validates:
                self._report(self._history.read())
                validation = self._validate()
            stopped = self._stop()
            saves = over or stopped or _is_due(training.step, config.save_every)
            if saves:
                self._report(self._history.read())
                self._save()
            if validates or saves:
                self._last_read = time.perf_counter()
            if stopped and not over:
                return None
        return validation

    def _record(self, step: Step) -> None:
        rows = self._history.record(*step)
        overdue = not rows and time.perf_counter() - self._last_read > PATIENCE
        self._report(self._history.read() if overdue else rows)

    def _report(self, rows: Sequence[Row]) -> None:
        """Report rows that have been read from the device, and add the time of their steps."""
        if not rows:
            return
        now = time.perf_counter()
        elapsed, self._last_read = now - self._last_read, now
        training = self._training
        training.seconds += elapsed
        units = len(rows) * training.config.batch * training.config.accumulate * training.recipe.units
        self._reporter.rows(rows, units / max(elapsed, 1e-9))

    def _validate(self) -> Row:
        self._history.read()
        early = self._history.record(*self._training.validate())
        row = (early or self._history.read())[-1]
        self._reporter.validated(row)
        return row


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
