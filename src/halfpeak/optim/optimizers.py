"""The optimizers that a configuration may name."""

from __future__ import annotations

import inspect
from typing import Final

import torch
from torch.optim import Optimizer

from halfpeak.optim.registry import Registry

TORCH_OPTIMIZERS: Final = tuple(
    sorted(
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    )
)
"""The names of torch's own, whichever the installed release has."""

OPTIMIZERS: Final = Registry("optimizer")
"""What ``type`` of an ``optimizer`` configuration may name: torch's optimizers, and what is added to them."""

for _name in TORCH_OPTIMIZERS:
    OPTIMIZERS.register_module(module=getattr(torch.optim, _name))
# With transformers installed, mmengine gives the name Adafactor to its class and calls torch's TorchAdafactor.
OPTIMIZERS.register_module("TorchAdafactor", module=torch.optim.Adafactor)
