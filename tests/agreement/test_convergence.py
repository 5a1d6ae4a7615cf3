"""Every level learns handwritten digits as well as float32 does."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from support.digits import digits, learn
from support.nets import LEVELS

MARGIN = 0.015
"""How far below O0's accuracy on the 360 held-out digits a level may end: five digits."""


@functools.cache
def parts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then held-out ones; images are 1 x 8 x 8 in [0, 1]."""
    images, labels = digits()
    images = images.reshape(-1, 1, 8, 8)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held, training = order[:360], order[360:]
    return images[training], labels[training], images[held], labels[held]


def make_convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.LayerNorm(32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


@functools.cache
def accuracy(level: str) -> float:
    images, labels, held_images, held_labels = parts()
    net = make_convnet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    engine = halfpeak.prepare(net, optimizer, level, clip=1.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        learn(engine, images, labels, torch.randperm(len(labels), generator=generator).split(64))
    net.eval()
    with torch.no_grad(), engine.forward():
        predicted = net(held_images).argmax(dim=1)
    return float((predicted == held_labels).float().mean())


def test_float32_learns() -> None:
    assert accuracy("O0") > 0.95


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "O0"])
def test_low_levels_learn_as_well(level: str) -> None:
    assert accuracy(level) >= accuracy("O0") - MARGIN
