"""Recipe: the interface of a training job, which gives a model and its data; the score of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class Batch(NamedTuple):
    """Inputs and the targets that the model should predict from them, on the device."""

    inputs: Tensor
    targets: Tensor


class Score(NamedTuple):
    """Means over one batch, on the device."""

    loss: Tensor  # f32[]
    accuracy: Tensor  # f32[]


class Recipe(Protocol):
    """A training job. All methods are pure functions of the configuration, the seed and the data on disk."""

    @property
    def samples(self) -> int:
        """The number of training samples."""
        ...

    @property
    def unit(self) -> str:
        """The unit of training speed: ``"samples"`` or ``"tokens"``."""
        ...

    @property
    def units(self) -> int:
        """The number of units in one sample."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest of the data, because a run can only be continued on the data that it began with."""
        ...

    def model(self) -> nn.Module:
        """A new float32 model, initialised from torch's current seed."""
        ...

    def batch(self, indices: Tensor) -> Batch:
        """The training samples with these indices.

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
    """The mean of the scores of batches of equal size, on the device."""
    return Score(*(torch.stack(list(column)).mean() for column in zip(*scores, strict=True)))
