"""The registries: names for optimizers, wrappers and constructors in a configuration."""

from __future__ import annotations

import inspect
from typing import Final

import torch
from torch.optim import Optimizer

from halfpeak import fused
from halfpeak.optim.amp_wrapper import AmpOptimWrapper
from halfpeak.optim.apex_wrapper import ApexOptimWrapper
from halfpeak.optim.registry import Registry
from halfpeak.optim.wrapper import OptimWrapper

TORCH_OPTIMIZERS: Final = tuple(
    sorted(
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer)
    )
)
"""The names of torch's own optimizers in the installed release, with that of their base class, as in mmcv and mmengine."""

FUSED_OPTIMIZERS: Final = tuple(getattr(fused, name) for name in fused.__all__)
"""halfpeak's own optimizers."""

OPTIMIZERS: Final = Registry("optimizer", mmengine="OPTIMIZERS")
"""What ``type`` of an ``optimizer`` configuration may name."""

for _name in TORCH_OPTIMIZERS:
    if _name != Optimizer.__name__:  # which steps nothing
        OPTIMIZERS.register_module(module=getattr(torch.optim, _name))
for _fused in FUSED_OPTIMIZERS:
    OPTIMIZERS.register_module(module=_fused)
# mmengine's name for torch's Adafactor, because "Adafactor" may be the one of transformers there.
OPTIMIZERS.register_module("TorchAdafactor", module=torch.optim.Adafactor)

OPTIM_WRAPPERS: Final = Registry("optimizer wrapper", mmengine="OPTIM_WRAPPERS")
"""What ``type`` of an ``optim_wrapper`` configuration may name."""

for _wrapper in (OptimWrapper, AmpOptimWrapper, ApexOptimWrapper):
    OPTIM_WRAPPERS.register_module(module=_wrapper)

OPTIM_WRAPPER_CONSTRUCTORS: Final = Registry(
    "optimizer wrapper constructor", mmengine="OPTIM_WRAPPER_CONSTRUCTORS"
)
"""What ``constructor`` of an ``optim_wrapper`` configuration may name."""
