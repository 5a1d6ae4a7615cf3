"""``digits``: a small residual network on scikit-learn's handwritten digits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfpeak.core.extras import needs_extra
from halfpeak.recipes.base import Batch
from halfpeak.recipes.settings import TrainConfig

HELD_OUT = 0.2
WIDTH = 16


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm, added to a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolve1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.convolve2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """f[batch, inputs, h, w] -> f[batch, outputs, h / stride, w / stride]."""
        inner = functional.relu(self.norm1(self.convolve1(x)))
        return functional.relu(self.norm2(self.convolve2(inner)) + self.shortcut(x))


class DigitsNet(nn.Module):
    """Convolution, two residual blocks, mean over the image, one linear layer: about 20 000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()
        )
        self.blocks = nn.Sequential(Residual(WIDTH, WIDTH, 1), Residual(WIDTH, 2 * WIDTH, 2))
        self.head = nn.Linear(2 * WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """f[batch, 1, 8, 8] -> f[batch, 10]."""
        # A mean, because adaptive pooling has no deterministic backward pass on a GPU.
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Digits:
    """1797 images of 8x8 pixels. A fixed fifth of each class is held out."""

    unit = "samples"
    units = 1

    def __init__(self, device: torch.device) -> None:
        images, labels, held_out = _load()
        self.fingerprint = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
        self._training = Batch(images[~held_out].to(device), labels[~held_out].to(device))
        self._validation = Batch(images[held_out].to(device), labels[held_out].to(device))
        self.samples = len(self._training.targets)

    def model(self) -> nn.Module:
        """A new network."""
        return DigitsNet()

    def batch(self, indices: Tensor) -> Batch:
        """The training images with these indices."""
        images, labels = self._training
        chosen = indices.to(labels.device, non_blocking=True)
        return Batch(images[chosen], labels[chosen])

    def validation(self) -> Iterator[Batch]:
        """All held-out images at once."""
        yield self._validation


def _load() -> tuple[Tensor, Tensor, Tensor]:
    """Load images f32[n, 1, 8, 8] in 0..1, labels i64[n], and the mask of held-out images bool[n]."""
    with needs_extra():
        from sklearn.datasets import load_digits
    bunch: Any = load_digits()
    images = torch.as_tensor(bunch["images"], dtype=torch.float32)[:, None] / 16
    labels = torch.as_tensor(bunch["target"], dtype=torch.int64)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for digit in range(10):
        members = torch.nonzero(labels == digit).flatten()
        shuffled = members[torch.randperm(len(members), generator=generator)]
        held_out[shuffled[: round(HELD_OUT * len(members))]] = True
    return images, labels, held_out


def build(config: TrainConfig, device: torch.device) -> Digits:
    """Build the recipe, which has no settings of its own."""
    return Digits(device)
