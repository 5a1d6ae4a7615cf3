"""``mmcv.runner.hooks.optimizer`` as of 1.7.2."""

from halfpeak.runner import (
    HOOKS,
    Fp16OptimizerHook,
    GradientCumulativeFp16OptimizerHook,
    GradientCumulativeOptimizerHook,
    Hook,
    LossScaler,
    OptimizerHook,
    allreduce_grads,
    wrap_fp16_model,
)

__all__ = [
    "HOOKS",
    "Fp16OptimizerHook",
    "GradientCumulativeFp16OptimizerHook",
    "GradientCumulativeOptimizerHook",
    "Hook",
    "LossScaler",
    "OptimizerHook",
    "allreduce_grads",
    "wrap_fp16_model",
]
