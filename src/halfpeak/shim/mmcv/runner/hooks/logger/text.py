"""``mmcv.runner.hooks.logger.text`` as of 1.7.2."""

from halfpeak.runner import HOOKS, TextLoggerHook

__all__ = ["HOOKS", "TextLoggerHook"]
