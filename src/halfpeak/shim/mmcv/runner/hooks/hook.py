"""``mmcv.runner.hooks.hook`` as of 1.7.2."""

from halfpeak.runner import HOOKS, Hook

__all__ = ["HOOKS", "Hook"]
