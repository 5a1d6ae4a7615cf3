"""``mmcv.runner.priority`` as of 1.7.2."""

from halfpeak.runner import Priority, get_priority

__all__ = ["Priority", "get_priority"]
