"""``mmcv.runner.base_runner`` as of 1.7.2."""

from halfpeak.runner import BaseRunner

__all__ = ["BaseRunner"]
