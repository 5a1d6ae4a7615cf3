"""Small models, data and optimizers that the tests of the doors train."""

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
"""Every level, so that a new one meets the tests of all."""
MASTERED = tuple(name for name, policy in POLICIES.items() if policy.masters)
LOW = {
    name: policy.compute for name, policy in POLICIES.items() if policy.compute not in (None, torch.float32)
}
"""What a level computes in, where that is a half dtype."""
STORED = {name: policy.param or torch.float32 for name, policy in POLICIES.items()}
"""What weights are stored in, norms aside."""
PURE = tuple(name for name in LEVELS if STORED[name] is not torch.float32 and name not in MASTERED)
"""Half weights without masters."""

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


def make_batch(seed: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Inputs and targets that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def poison(parameter: Tensor, value: float = float("inf")) -> None:
    """Make one element of a gradient not finite, where backward has just left it."""
    assert parameter.grad is not None
    parameter.grad.view(-1)[-1] = value


@contextmanager
def overflowing(parameter: Tensor, value: float = float("inf")) -> Iterator[None]:
    """In the body each gradient of the parameter comes with one element that is not finite."""

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
    """In which dtype a product is computed here and now."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
