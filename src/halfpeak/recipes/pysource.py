"""``pysource``: a decoder-only transformer over bytes, on the source text of Python's own standard library."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfpeak.core.errors import ConfigError
from halfpeak.recipes.base import Batch
from halfpeak.recipes.settings import RECIPES, TrainConfig

HELD_OUT_OF = 20
"""One file in this many is held out."""

VALIDATION_SAMPLES = 64

DEFAULTS = RECIPES["pysource"].defaults

VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """The number of layers, the width and the number of heads."""

    layers: int
    width: int
    heads: int


SHAPES: Final[Mapping[str, Shape]] = {
    "tiny": Shape(4, 128, 4),
    "small": Shape(6, 384, 6),
    "medium": Shape(12, 512, 8),
    "large": Shape(12, 768, 12),
    "xl": Shape(24, 1024, 16),
}
"""Sizes by name: 0.8, 11, 38, 85 and 303 million parameters. ``large`` is GPT-2's 124M shape without its word table."""


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on a normalised input and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """f[batch, time, width] -> the same shape."""
        stream = stream + self._attention(self.norm1(stream))
        return stream + self.narrow(functional.gelu(self.widen(self.norm2(stream)), approximate="tanh"))

    def _attention(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.attend(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each f[batch, heads, time, width / heads]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.merge(mixed.transpose(1, 2).reshape(batch, time, width))


class ByteGPT(nn.Module):
    """Predicts each next byte from the bytes before it. The output weights are the byte embeddings."""

    def __init__(self, shape: Shape, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("merge.weight", "narrow.weight")):
                # 2 * layers terms are added to the stream; this std keeps its variance independent of the depth.
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """i64[batch, time] -> f[batch, time, 256]: the logits of each next byte."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.blocks(self.bytes(tokens) + self.places(places))
        return functional.linear(self.norm(stream).to(self.bytes.weight.dtype), self.bytes.weight)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


class PySource:
    """The library's ``.py`` files end to end, each followed by a zero byte, cut into windows of ``context`` bytes.

    Training and held-out text share no file: the digest of a file's path decides to which text it belongs.
    """

    unit = "tokens"

    def __init__(
        self, size: str, context: int, batch: int, device: torch.device, root: Path | None = None
    ) -> None:
        self._shape = SHAPES[size]
        self.units = context
        training, held_out = _read(root or Path(sysconfig.get_paths()["stdlib"]))
        self.fingerprint = hashlib.sha256(training + held_out).hexdigest()
        self._training = torch.frombuffer(bytearray(training), dtype=torch.uint8).to(device)
        self._held_out = torch.frombuffer(bytearray(held_out), dtype=torch.uint8).to(device)
        self._batch = batch
        self.samples = (len(training) - 1) // context
        self._held_out_samples = min(VALIDATION_SAMPLES, (len(held_out) - 1) // context)
        if self.samples < 1 or self._held_out_samples < 1:
            raise ConfigError(
                f"context={context} is longer than the text of recipe 'pysource'; write context={DEFAULTS['context']}"
            )

    def model(self) -> nn.Module:
        """A new transformer."""
        return ByteGPT(self._shape, self.units)

    def batch(self, indices: Tensor) -> Batch:
        """The training windows with these indices."""
        return self._windows(self._training, indices)

    def validation(self) -> Iterator[Batch]:
        """Windows spread evenly over the held-out text."""
        last = (len(self._held_out) - 1) // self.units - 1
        for chosen in torch.linspace(0, last, self._held_out_samples).long().split(self._batch):
            yield self._windows(self._held_out, chosen)

    def _windows(self, text: Tensor, indices: Tensor) -> Batch:
        starts = (indices * self.units).to(text.device, non_blocking=True)
        places = starts[:, None] + torch.arange(self.units + 1, device=text.device)
        windows = text[places].long()
        return Batch(windows[:, :-1], windows[:, 1:])


def _read(root: Path) -> tuple[bytes, bytes]:
    """Read the training and the held-out text from the files under ``root``."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "dist-packages" in name or not path.is_file():
            continue
        held_out = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % HELD_OUT_OF == 0
        parts[held_out].append(path.read_bytes() + b"\0")
    if not all(parts):
        raise ConfigError(
            f"recipe 'pysource' finds too little Python source text under {root}; use recipe 'digits'"
        )
    return b"".join(parts[0]), b"".join(parts[1])


def build(config: TrainConfig, device: torch.device) -> PySource:
    """Build the recipe with the configured size and context, on the library of the running Python."""
    size, context = config.size or DEFAULTS["size"], config.context or DEFAULTS["context"]
    return PySource(size, context, config.batch, device)
