"""The loop of a training run and the hooks that it calls: the door for code written for ``mmcv.runner``.

Answers to mmcv 1.7.2 and does not need it.
"""

from halfpeak.runner.hook import Hook
from halfpeak.runner.log_buffer import LogBuffer
from halfpeak.runner.priority import Priority, get_priority

__all__ = ["Hook", "LogBuffer", "Priority", "get_priority"]
