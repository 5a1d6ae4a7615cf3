"""``mmcv.runner.hooks.ema`` as of 1.7.2."""

from halfpeak.runner import HOOKS, EMAHook, Hook

__all__ = ["HOOKS", "EMAHook", "Hook"]
