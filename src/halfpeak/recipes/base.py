"""What a recipe is: a model, its data, and what is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class Batch(NamedTuple):
    """Inputs and what the model should say about them, on the device."""

    inputs: Tensor
    targets: Tensor


class Score(NamedTuple):
    """Means over one batch, on the device."""

    loss: Tensor  # f32[]
    accuracy: Tensor  # f32[]


class Recipe(Protocol):
    """A training job. Everything here is a pure function of the configuration, the seed and the data on disk."""

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


def score(outputs: Tensor, targets: Tensor) -> Score:
    """Mean cross entropy (in nats) and accuracy of a batch.

    Args:
        outputs: f[batch, ..., classes].
        targets: i64[batch, ...].
    """
    logits, wanted = outputs.flatten(0, -2), targets.flatten()
    loss = functional.cross_entropy(logits.float(), wanted)
    return Score(loss, (logits.argmax(1) == wanted).float().mean())


def mean_score(scores: Sequence[Score]) -> Score:
    """The mean of scores of equally large batches, on the device."""
    return Score(*(torch.stack(list(column)).mean() for column in zip(*scores, strict=True)))
