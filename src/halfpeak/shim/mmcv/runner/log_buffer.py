"""``mmcv.runner.log_buffer`` as of 1.7.2."""

from halfpeak.runner import LogBuffer

__all__ = ["LogBuffer"]
