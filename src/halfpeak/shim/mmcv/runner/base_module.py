"""``mmcv.runner.base_module`` as of 1.7.2."""

from halfpeak.runner import BaseModule, ModuleDict, ModuleList, Sequential

__all__ = ["BaseModule", "ModuleDict", "ModuleList", "Sequential"]
