"""Data and model of the scripts in this folder: scikit-learn's digits, 8x8 pixels each, and a small network."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HELD_OUT = 360


class Classifier(nn.Sequential):
    """Two convolutions and a linear layer; a runner calls ``train_step`` and ``val_step``."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(512, 10)),
        )

    def train_step(self, data: list[Tensor], optimizer: object = None) -> dict[str, object]:
        images, labels = data
        outputs = self(images)
        loss = cross_entropy(outputs.float(), labels)
        accuracy = (outputs.argmax(1) == labels).float().mean()
        # Tensors may be logged: they stay on the device until the logger averages them.
        log_vars = {"loss": loss.detach(), "accuracy": accuracy}
        return {"loss": loss, "log_vars": log_vars, "num_samples": len(images)}

    val_step = train_step


def loaders(batch: int, device: torch.device, ranks: int = 1) -> tuple[DataLoader, DataLoader]:
    """The loader of the training images, shuffled and split over the ranks, and the loader of the held-out images."""
    bunch = load_digits()
    images = torch.as_tensor(bunch.images, dtype=torch.float32, device=device)[:, None] / 16
    labels = torch.as_tensor(bunch.target, device=device)
    training = TensorDataset(images[HELD_OUT:], labels[HELD_OUT:])
    sampler = DistributedSampler(training) if ranks > 1 else None
    return (
        DataLoader(training, batch, shuffle=sampler is None, sampler=sampler, drop_last=True),
        # With a generator of its own, validation draws no random numbers of the training, which a resume continues.
        DataLoader(
            TensorDataset(images[:HELD_OUT], labels[:HELD_OUT]), HELD_OUT, generator=torch.Generator()
        ),
    )


def accuracy(model: nn.Module, held_out: DataLoader) -> float:
    """The share of held-out images that the model classifies correctly."""
    model.eval()
    with torch.no_grad():
        hits = [model(images).argmax(1) == labels for images, labels in held_out]
    model.train()
    return torch.cat(hits).float().mean().item()
