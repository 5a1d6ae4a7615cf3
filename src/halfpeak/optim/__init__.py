"""One interface for accumulation, clipping and mixed precision: the interface of ``mmengine.optim``.

Compatible with mmengine 0.10.7, which need not be installed; ``docs/compat/mmengine.md`` lists every difference.
"""

from halfpeak.optim.amp_wrapper import AmpOptimWrapper
from halfpeak.optim.apex_wrapper import ApexOptimWrapper
from halfpeak.optim.base import BaseOptimWrapper
from halfpeak.optim.builder import DefaultOptimWrapperConstructor, build_optim_wrapper
from halfpeak.optim.members import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS
from halfpeak.optim.metrics_sink import ScalarHistory
from halfpeak.optim.registry import Registry
from halfpeak.optim.wrapper import OptimWrapper
from halfpeak.optim.wrapper_dict import OptimWrapperDict

__all__ = [
    "OPTIMIZERS",
    "OPTIM_WRAPPERS",
    "OPTIM_WRAPPER_CONSTRUCTORS",
    "AmpOptimWrapper",
    "ApexOptimWrapper",
    "BaseOptimWrapper",
    "DefaultOptimWrapperConstructor",
    "OptimWrapper",
    "OptimWrapperDict",
    "Registry",
    "ScalarHistory",
    "build_optim_wrapper",
]
