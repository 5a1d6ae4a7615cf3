"""SyncBuffersHook: the same batch-norm statistics on every rank. Answers to mmcv 1.7.2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfpeak.core.errors import ConfigTypeError
from halfpeak.runner.allreduce import allreduce_params
from halfpeak.runner.hook import Hook

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner


class SyncBuffersHook(Hook):
    """Replaces the model's buffers by their mean over the ranks, after each epoch.

    Args:
        distributed: False does nothing.

    Raises:
        ConfigTypeError: it is neither True nor False.
    """

    def __init__(self, distributed: bool = True) -> None:
        if not isinstance(distributed, bool):
            raise ConfigTypeError(f"distributed={distributed!r} must be True or False")
        self.distributed = distributed

    def after_epoch(self, runner: BaseRunner) -> None:
        """Average them."""
        if self.distributed:
            allreduce_params(runner.model.buffers())
