"""A training as the terminal and the summary see it, whatever drives it."""

from __future__ import annotations

from typing import Protocol

import torch

from halfpeak.recipes.base import Recipe
from halfpeak.recipes.plan import Plan


class Job(Protocol):
    """What both :class:`~halfpeak.recipes.training.Training` and a runner's job tell of themselves.

    Attributes:
        seconds: time spent in training iterations.
    """

    plan: Plan
    recipe: Recipe
    device: torch.device
    parameters: int
    seconds: float

    @property
    def step(self) -> int:
        """Steps begun so far, skipped ones included."""
        ...

    @property
    def taken(self) -> int:
        """Steps in which the optimizer moved."""
        ...
