"""IterTimerHook: how long iterations take, and how much of it is waiting for data. Answers to mmcv 1.7.2."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from halfpeak.runner.hook import Hook

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner


class IterTimerHook(Hook):
    """Logs ``data_time``, from the end of one iteration to the beginning of the next, and ``time``, to its end."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def before_epoch(self, runner: BaseRunner) -> None:
        """Start the clock."""
        self._last = time.perf_counter()

    def before_iter(self, runner: BaseRunner) -> None:
        """Log the wait for data."""
        runner.log_buffer.update({"data_time": time.perf_counter() - self._last})

    def after_iter(self, runner: BaseRunner) -> None:
        """Log the whole iteration, and start anew."""
        now = time.perf_counter()
        runner.log_buffer.update({"time": now - self._last})
        self._last = now
