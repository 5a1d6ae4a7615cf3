"""``mmcv.runner.hooks.iter_timer`` as of 1.7.2."""

from halfpeak.runner import HOOKS, Hook, IterTimerHook

__all__ = ["HOOKS", "Hook", "IterTimerHook"]
