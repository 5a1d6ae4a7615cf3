"""A decoder-only transformer over bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

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
