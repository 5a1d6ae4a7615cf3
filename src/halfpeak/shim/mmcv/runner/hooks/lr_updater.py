"""``mmcv.runner.hooks.lr_updater`` as of 1.7.2."""

from halfpeak.runner import (
    HOOKS,
    CosineAnnealingLrUpdaterHook,
    CosineRestartLrUpdaterHook,
    CyclicLrUpdaterHook,
    ExpLrUpdaterHook,
    FixedLrUpdaterHook,
    FlatCosineAnnealingLrUpdaterHook,
    Hook,
    InvLrUpdaterHook,
    LinearAnnealingLrUpdaterHook,
    LrUpdaterHook,
    OneCycleLrUpdaterHook,
    PolyLrUpdaterHook,
    StepLrUpdaterHook,
)

__all__ = [
    "HOOKS",
    "CosineAnnealingLrUpdaterHook",
    "CosineRestartLrUpdaterHook",
    "CyclicLrUpdaterHook",
    "ExpLrUpdaterHook",
    "FixedLrUpdaterHook",
    "FlatCosineAnnealingLrUpdaterHook",
    "Hook",
    "InvLrUpdaterHook",
    "LinearAnnealingLrUpdaterHook",
    "LrUpdaterHook",
    "OneCycleLrUpdaterHook",
    "PolyLrUpdaterHook",
    "StepLrUpdaterHook",
]
