"""Handwritten digits, and a loop that trains an engine on them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import halfpeak


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Images in [0, 1] of 64 pixels, and labels."""
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    return torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)


def learn(engine: halfpeak.Engine, images: Tensor, labels: Tensor, batches: Iterable[Tensor]) -> None:
    """One step for each batch of row numbers."""
    for rows in batches:
        with engine.forward():
            loss = cross_entropy(engine.model(images[rows]), labels[rows])
        engine.backward(loss)
        engine.step()
