"""``mmcv.runner.optimizer`` as of 1.7.2."""

from halfpeak.optim import OPTIMIZERS
from halfpeak.runner import (
    OPTIMIZER_BUILDERS,
    DefaultOptimizerConstructor,
    build_optimizer,
    build_optimizer_constructor,
)

__all__ = [
    "OPTIMIZERS",
    "OPTIMIZER_BUILDERS",
    "DefaultOptimizerConstructor",
    "build_optimizer",
    "build_optimizer_constructor",
]
