"""``mmcv.parallel`` as of 1.7.2: one process for each device."""

from halfpeak.runner import MMDataParallel, MMDistributedDataParallel
from halfpeak.runner.data_parallel import is_module_wrapper

__all__ = ["MMDataParallel", "MMDistributedDataParallel", "is_module_wrapper"]
