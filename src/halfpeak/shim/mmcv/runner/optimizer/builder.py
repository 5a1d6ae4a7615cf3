"""``mmcv.runner.optimizer.builder`` as of 1.7.2."""

from halfpeak.optim import OPTIMIZERS
from halfpeak.optim.members import TORCH_OPTIMIZERS
from halfpeak.runner import OPTIMIZER_BUILDERS, build_optimizer, build_optimizer_constructor

__all__ = [
    "OPTIMIZERS",
    "OPTIMIZER_BUILDERS",
    "TORCH_OPTIMIZERS",
    "build_optimizer",
    "build_optimizer_constructor",
]
