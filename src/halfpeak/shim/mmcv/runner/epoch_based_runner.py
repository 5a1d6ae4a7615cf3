"""``mmcv.runner.epoch_based_runner`` as of 1.7.2."""

from halfpeak.runner import RUNNERS, BaseRunner, EpochBasedRunner, save_checkpoint
from halfpeak.runner import EpochBasedRunner as Runner

__all__ = ["RUNNERS", "BaseRunner", "EpochBasedRunner", "Runner", "save_checkpoint"]
