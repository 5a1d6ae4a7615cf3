"""Ctrl-C and SIGTERM: the first is a request to stop after the running step, the second stops at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupt:
    """While entered, SIGINT and SIGTERM only set :attr:`signal`; the handlers are put back afterwards.

    Outside the main thread no handler can be set, and nothing is.

    Attributes:
        signal: the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        """Whether a signal asked to stop."""
        return self.signal is not None

    @property
    def exit_status(self) -> int:
        """What a shell expects of a process that such a signal ended."""
        return 128 + (self.signal or signal.SIGINT)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        # At once, since a step may take long; and not through a stream that the signal may have interrupted.
        os.write(2, b"\nstopping after this step, to save the run; again: at once, without saving\n")
