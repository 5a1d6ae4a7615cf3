"""``mmcv.runner.hooks.logger.base`` as of 1.7.2."""

from halfpeak.runner import HOOKS, LoggerHook

__all__ = ["HOOKS", "LoggerHook"]
