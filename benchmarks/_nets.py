"""The networks that the benchmarks train, each with a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Task(NamedTuple):
    """A network and its batch.

    Attributes:
        build: makes the network.
        x: the inputs.
        y: the targets: classes, or numbers.
        channels_last: whether network and batch have this memory format.
    """

    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    channels_last: bool = False

    def loss(self, output: Tensor) -> Tensor:
        """Compute the loss in float32."""
        wide = output.float()
        if self.y.is_floating_point():
            return F.mse_loss(wide, self.y)
        return F.cross_entropy(wide.flatten(0, -2), self.y.flatten())


def tasks(device: str) -> dict[str, Task]:
    """The tasks by name, of sizes for which a step takes one CPU thread about a tenth of a second."""
    random = torch.Generator().manual_seed(0)
    normal = [
        torch.randn(shape, generator=random) for shape in ((256, 1024), (256, 1024), (32, 64), (32, 64))
    ]
    images = torch.randn(16, 3, 32, 32, generator=random).to(memory_format=torch.channels_last)
    words = torch.randint(1024, (8, 129), generator=random)
    classes = torch.randint(10, (16,), generator=random)
    found = {
        "GPT, width 256, 4 layers": Task(GPT, words[:, :-1], words[:, 1:]),
        "MLP, 4 layers of 1024": Task(mlp, normal[0], normal[1]),
        "CNN, 64 and 128 channels": Task(cnn, images, classes, channels_last=True),
        "40 layers of 64, bound by overhead": Task(deep, normal[2], normal[3]),
    }
    return {name: task._replace(x=task.x.to(device), y=task.y.to(device)) for name, task in found.items()}


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A small GPT."""

    def __init__(self, width: int = 256, layers: int = 4, words: int = 1024, length: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(self.words(x) + places)))


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def mlp() -> nn.Module:
    """A network of large matrix products and nothing else."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """Two stages of two residual blocks."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        *(Residual(64) for _ in range(2)),
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        *(Residual(128) for _ in range(2)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def deep() -> nn.Module:
    """A network of many layers with very little to compute."""
    return nn.Sequential(*(layer for _ in range(40) for layer in (nn.Linear(64, 64), nn.ReLU())))
