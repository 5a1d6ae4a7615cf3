"""Counters of an engine: micro-steps, steps taken and steps skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from halfpeak.core.state_checks import Schema, require, require_count

COUNTERS: Final[Schema] = {
    "micro_step": require_count,
    "num_steps": require_count,
    "num_skipped": require_count,
}
"""The state of :class:`Counters`."""


class Counters:
    """Counts what has happened since the beginning of a run.

    Attributes:
        micro_step: ended micro-steps; the last one of each window is the step.
        num_steps: steps in which the optimizers moved.  # i32[]
        num_skipped: steps that were skipped.            # i32[]
        num_dropped: passes and windows that an exception or ``abort()`` has ended in this process.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.micro_step = self.num_dropped = 0
        self.num_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.num_skipped = torch.zeros((), dtype=torch.int32, device=device)

    def now(self) -> tuple[Tensor, Tensor]:
        """Steps taken, and steps skipped.  # i32[], i32[]"""
        return self.num_steps, self.num_skipped

    def after(self, skip: Tensor | bool) -> tuple[Tensor, Tensor]:
        """:meth:`now` after one more step, taken or skipped.  # i32[], i32[]"""
        if isinstance(skip, bool):
            return (self.num_steps, self.num_skipped + 1) if skip else (self.num_steps + 1, self.num_skipped)
        skipped = skip.to(torch.int32)
        return self.num_steps + (1 - skipped), self.num_skipped + skipped

    def restart_window(self, every: int) -> None:
        """Begin the accumulation window of ``every`` backward passes again."""
        self.num_dropped += 1
        self.micro_step -= self.micro_step % every

    def state_dict(self) -> dict[str, int]:
        """The counters of the run. Waits for the device."""
        return {
            "micro_step": self.micro_step,
            "num_steps": int(self.num_steps),
            "num_skipped": int(self.num_skipped),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            StateError: a counter is missing, unknown or out of range. Nothing was loaded.
        """
        require(state, "state", COUNTERS)
        self.micro_step = state["micro_step"]
        self.num_steps = torch.full_like(self.num_steps, state["num_steps"])
        self.num_skipped = torch.full_like(self.num_skipped, state["num_skipped"])
