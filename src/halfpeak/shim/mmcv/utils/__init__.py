"""``mmcv.utils`` as of 1.7.2: what a training script needs of it."""

from halfpeak.optim import Registry
from halfpeak.runner.utilities import build_from_cfg, get_logger, mkdir_or_exist, symlink

__all__ = ["Registry", "build_from_cfg", "get_logger", "mkdir_or_exist", "symlink"]
