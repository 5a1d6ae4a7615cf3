"""``mmcv.runner.hooks.memory`` as of 1.7.2."""

from halfpeak.runner import HOOKS, EmptyCacheHook, Hook

__all__ = ["HOOKS", "EmptyCacheHook", "Hook"]
