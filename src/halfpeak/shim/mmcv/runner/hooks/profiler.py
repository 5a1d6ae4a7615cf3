"""``mmcv.runner.hooks.profiler`` as of 1.7.2."""

from halfpeak.runner import HOOKS, Hook, ProfilerHook

__all__ = ["HOOKS", "Hook", "ProfilerHook"]
