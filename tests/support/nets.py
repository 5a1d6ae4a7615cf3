"""Small models, data and optimizers for the tests, and tables of what each level does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfpeak

POLICIES = {name: level.properties.policy() for name, level in halfpeak.LEVELS.items()}
LEVELS = tuple(POLICIES)
"""Every level, so that the tests of all levels include a new one."""
TYPICAL = ("O0", "O1", "O2", "O5")
"""Float32, casts of operations, and masters over weights in float16 and in bfloat16."""
MASTERED = tuple(name for name, policy in POLICIES.items() if policy.masters)
LOW = {
    name: policy.compute for name, policy in POLICIES.items() if policy.compute not in (None, torch.float32)
}
"""The dtype that a level computes in, for the levels where it is low-precision."""
STORED = {name: policy.param or torch.float32 for name, policy in POLICIES.items()}
"""The dtype of stored weights, except those of norms."""
PURE = tuple(name for name in LEVELS if STORED[name] is not torch.float32 and name not in MASTERED)
"""The levels with low-precision weights and no masters."""


def dynamic(level: str) -> halfpeak.Level:
    """The level with a dynamic loss scale."""
    return halfpeak.LEVELS[level].replace(loss_scale="dynamic")


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4, fused=True),
    "adam-foreach": lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-4, foreach=True),
}


def make_net(seed: int = 0) -> nn.Sequential:
    """Linear, batch norm, ReLU, layer norm, Linear: weights that are cast and norms that are not."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))


def make_normless(seed: int = 0) -> nn.Sequential:
    """A net without running statistics, which halfpeak restores after an overflow and torch's ``GradScaler`` does not."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def make_batch(seed: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Inputs and targets that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def poison(parameter: Tensor, value: float = float("inf")) -> None:
    """Make one element of the gradient that backward has just computed nonfinite."""
    assert parameter.grad is not None
    parameter.grad.view(-1)[-1] = value


@contextmanager
def overflowing(parameter: Tensor, value: float = float("inf")) -> Iterator[None]:
    """In the body, each new gradient of the parameter has one nonfinite element."""

    def spoil(grad: Tensor) -> Tensor:
        spoilt = grad.clone()
        spoilt.view(-1)[-1] = value
        return spoilt

    handle = parameter.register_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def product() -> torch.dtype:
    """The dtype in which a matrix product is computed under the present casts."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
