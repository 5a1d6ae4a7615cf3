"""EmptyCacheHook: give cached memory of the accelerator back. Answers to mmcv 1.7.2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halfpeak.core.errors import ConfigTypeError
from halfpeak.runner.hook import Hook

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner


class EmptyCacheHook(Hook):
    """Empties the cache of the accelerator's allocator at the chosen moments.

    Raises:
        ConfigTypeError: a moment is neither True nor False.
    """

    def __init__(
        self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False
    ) -> None:
        moments = {"before_epoch": before_epoch, "after_epoch": after_epoch, "after_iter": after_iter}
        for name, flag in moments.items():
            if not isinstance(flag, bool):
                raise ConfigTypeError(f"{name}={flag!r} must be True or False")
        self._moments = frozenset(name for name, flag in moments.items() if flag)

    def before_epoch(self, runner: BaseRunner) -> None:
        """Empty the cache, if asked to here."""
        self._empty("before_epoch")

    def after_epoch(self, runner: BaseRunner) -> None:
        """Empty the cache, if asked to here."""
        self._empty("after_epoch")

    def after_iter(self, runner: BaseRunner) -> None:
        """Empty the cache, if asked to here."""
        self._empty("after_iter")

    def _empty(self, moment: str) -> None:
        if moment in self._moments and torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()
