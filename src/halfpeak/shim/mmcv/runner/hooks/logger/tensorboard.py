"""``mmcv.runner.hooks.logger.tensorboard`` as of 1.7.2."""

from halfpeak.runner import HOOKS, TensorboardLoggerHook

__all__ = ["HOOKS", "TensorboardLoggerHook"]
