"""``mmcv.runner.hooks.momentum_updater`` as of 1.7.2."""

from halfpeak.runner import (
    HOOKS,
    CosineAnnealingMomentumUpdaterHook,
    CyclicMomentumUpdaterHook,
    Hook,
    LinearAnnealingMomentumUpdaterHook,
    MomentumUpdaterHook,
    OneCycleMomentumUpdaterHook,
    StepMomentumUpdaterHook,
)

__all__ = [
    "HOOKS",
    "CosineAnnealingMomentumUpdaterHook",
    "CyclicMomentumUpdaterHook",
    "Hook",
    "LinearAnnealingMomentumUpdaterHook",
    "MomentumUpdaterHook",
    "OneCycleMomentumUpdaterHook",
    "StepMomentumUpdaterHook",
]
