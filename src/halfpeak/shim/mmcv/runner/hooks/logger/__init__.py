"""``mmcv.runner.hooks.logger`` as of 1.7.2."""

from halfpeak.runner import LoggerHook, TensorboardLoggerHook, TextLoggerHook

__all__ = ["LoggerHook", "TensorboardLoggerHook", "TextLoggerHook"]
