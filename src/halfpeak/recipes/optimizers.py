"""Optimizers by name, and the learning rate as a pure function of the number of steps that were not skipped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from halfpeak.fused import FusedLAMB, FusedNovoGrad
from halfpeak.recipes.settings import TrainConfig

OPTIMIZERS: Final[Mapping[str, tuple[type[Optimizer], Mapping[str, Any]]]] = {
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.95)}),
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95)}),
    "adagrad": (torch.optim.Adagrad, {}),
    "lamb": (FusedLAMB, {}),
    "nadam": (torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "novograd": (FusedNovoGrad, {"betas": (0.95, 0.98)}),
    "radam": (torch.optim.RAdam, {"decoupled_weight_decay": True}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}

FUSED = frozenset({"adam", "adamw", "sgd"})

LEAST_FACTOR = 0.01
"""The final learning rate as a share of the peak."""

LOW_EPSILON = 1e-4


def build_optimizer(config: TrainConfig, model: nn.Module, *, steps_low: bool) -> Optimizer:
    """Build the optimizer of the model's parameters. Vectors (biases, norms) get no weight decay.

    Args:
        steps_low: whether the optimizer will step low-precision parameters. Its epsilon is then 1e-4, because the usual
            1e-8 is 0 in float16, so that a second moment of zero would cause a division by zero.
    """
    kind, options = OPTIMIZERS[config.optimizer]
    epsilon = {"eps": LOW_EPSILON} if steps_low and config.optimizer != "sgd" else {}
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    on_cuda = all(parameter.is_cuda for parameter in model.parameters())
    # Torch's fused optimizers read found_inf in their kernel, so no step waits for the device.
    fused = {"fused": True} if on_cuda and config.optimizer in FUSED else {}
    return kind(groups, lr=config.lr, **options, **epsilon, **fused)  # type: ignore[call-arg]


def learning_rate(config: TrainConfig, num_steps: int) -> float:
    """The learning rate of the step after ``num_steps`` steps that were not skipped.

    It rises linearly over ``warmup`` steps, then falls to a hundredth of its peak by ``schedule_steps`` and stays
    there. With schedule ``"constant"`` it does not fall.

    >>> config = TrainConfig(optimizer="sgd", lr=1.0, weight_decay=0.0, warmup=2, batch=1, eval_every=0, save_every=0,
    ...             schedule="linear", schedule_steps=12)
    >>> [round(learning_rate(config, n), 3) for n in (0, 1, 2, 7, 12, 99)]
    [0.5, 1.0, 1.0, 0.505, 0.01, 0.01]
    """
    warmup = config.warmup or 0
    if num_steps < warmup:
        return config.lr * (num_steps + 1) / warmup
    if config.schedule == "constant" or config.schedule_steps is None:
        return config.lr
    done = min(1.0, (num_steps - warmup) / max(1, config.schedule_steps - warmup))
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (LEAST_FACTOR + (1.0 - LEAST_FACTOR) * left)
