"""DistSamplerSeedHook: a new order of the data in each epoch. Answers to mmcv 1.7.2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfpeak.runner.batches import set_epoch
from halfpeak.runner.hook import Hook

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner


class DistSamplerSeedHook(Hook):
    """Tells the sampler of the current loader, or the one in its batch sampler, which epoch begins (``set_epoch``)."""

    def before_epoch(self, runner: BaseRunner) -> None:
        """Tell it."""
        set_epoch(runner.data_loader, runner.epoch)
