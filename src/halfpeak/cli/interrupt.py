"""Interrupt: the first SIGINT (Ctrl-C) or SIGTERM asks to stop after the current step, the second stops at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Self


class Interrupt:
    """A context in which the first SIGINT or SIGTERM only sets :attr:`signal`; its exit restores the old handlers.

    In a thread other than the main thread this does nothing, because Python cannot set handlers there.

    Attributes:
        signal: the signal that was received, or None.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        """Whether a signal asked to stop."""
        return self.signal is not None

    @property
    def exit_status(self) -> int:
        """The exit status by which a shell recognises a process that this signal ended."""
        return 128 + (self.signal or signal.SIGINT)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        # Answer now, because a step may take long. No sys.stderr: the signal may have interrupted a write to it.
        os.write(2, b"\nstopping after this step, to save the run; again: at once, without saving\n")
