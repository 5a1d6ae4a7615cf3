"""``mmcv.runner.hooks.evaluation`` as of 1.7.2."""

from halfpeak.runner import HOOKS, DistEvalHook, EvalHook, Hook

__all__ = ["HOOKS", "DistEvalHook", "EvalHook", "Hook"]
