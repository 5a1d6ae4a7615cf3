"""``mmcv`` as of 1.7.2, where none is installed: what training scripts call."""

from halfpeak.runner.utilities import mkdir_or_exist, symlink

__version__ = "1.7.2"

__all__ = ["__version__", "mkdir_or_exist", "symlink"]
