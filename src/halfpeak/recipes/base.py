"""What a recipe is: a model, its data, and what is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from halfpeak.recipes.plan import Plan


class Batch(NamedTuple):
    """Inputs and what the model should say about them, on the device."""

    inputs: Tensor
    targets: Tensor


class Score(NamedTuple):
    """Means over one batch, on the device."""

    loss: Tensor  # f32[]
    accuracy: Tensor  # f32[]


class Recipe(Protocol):
    """A training job. Everything here is a pure function of the plan, the seed and the data on disk."""

    @property
    def samples(self) -> int:
        """How many training samples there are."""
        ...

    @property
    def unit(self) -> str:
        """What the speed is counted in: ``"samples"`` or ``"tokens"``."""
        ...

    @property
    def units(self) -> int:
        """How many units one sample holds."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest of the data: a run can only be continued on the data that it began with."""
        ...

    def model(self) -> nn.Module:
        """A new float32 model, initialised from torch's current seed."""
        ...

    def batch(self, indices: Tensor) -> Batch:
        """The training samples of these numbers.

        Args:
            indices: i64[batch], on the host.
        """
        ...

    def validation(self) -> Iterator[Batch]:
        """The held-out samples, always in the same order."""
        ...

    def score(self, outputs: Tensor, targets: Tensor) -> Score:
        """Mean loss and accuracy of a batch."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What is known of a recipe before its data is loaded.

    Attributes:
        defaults: the settings it brings; every setting of a plan without a default of its own is among them. A short
            run gets less than their warm-up.
        own: the settings that only this recipe reads.
    """

    name: str
    brief: str
    defaults: Mapping[str, Any]
    own: frozenset[str]
    build: Callable[[Plan, torch.device], Recipe]
