"""``mmcv.runner.optimizer.default_constructor`` as of 1.7.2."""

from halfpeak.optim import OPTIMIZERS
from halfpeak.runner import OPTIMIZER_BUILDERS, DefaultOptimizerConstructor

__all__ = ["OPTIMIZERS", "OPTIMIZER_BUILDERS", "DefaultOptimizerConstructor"]
