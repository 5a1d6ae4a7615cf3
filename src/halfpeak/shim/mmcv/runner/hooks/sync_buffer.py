"""``mmcv.runner.hooks.sync_buffer`` as of 1.7.2."""

from halfpeak.runner import HOOKS, Hook, SyncBuffersHook

__all__ = ["HOOKS", "Hook", "SyncBuffersHook"]
