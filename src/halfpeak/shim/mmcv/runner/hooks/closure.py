"""``mmcv.runner.hooks.closure`` as of 1.7.2."""

from halfpeak.runner import HOOKS, ClosureHook, Hook

__all__ = ["HOOKS", "ClosureHook", "Hook"]
