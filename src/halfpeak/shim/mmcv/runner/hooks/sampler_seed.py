"""``mmcv.runner.hooks.sampler_seed`` as of 1.7.2."""

from halfpeak.runner import HOOKS, DistSamplerSeedHook, Hook

__all__ = ["HOOKS", "DistSamplerSeedHook", "Hook"]
