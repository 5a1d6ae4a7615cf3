"""``mmcv.runner.hooks.checkpoint`` as of 1.7.2."""

from halfpeak.runner import HOOKS, CheckpointHook, Hook

__all__ = ["HOOKS", "CheckpointHook", "Hook"]
