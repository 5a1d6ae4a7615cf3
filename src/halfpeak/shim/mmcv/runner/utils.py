"""``mmcv.runner.utils`` as of 1.7.2."""

from halfpeak.runner import get_host_info, get_time_str, set_random_seed

__all__ = ["get_host_info", "get_time_str", "set_random_seed"]
