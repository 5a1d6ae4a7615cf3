"""Small networks for the fuzzer, made of named parts: each part takes and gives eight features per row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 8
ROWS = 4
WORDS = 6


class Linear(nn.Module):
    """A linear layer; subclasses say what their forward pass does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.relu(self.layer(x))


class ConvNorm(nn.Module):
    """A convolution and a batch norm, whose statistics a skipped step restores."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x.view(-1, 2, 2, 2)))).flatten(1)


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.norm(x)


class LayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.layer(self.norm(x))


class GroupNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.gelu(self.norm(x))


class InstanceNorm(nn.Module):
    """The other norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.norm(x.view(-1, 2, 4)).flatten(1)


class Tied(nn.Module):
    """One weight for an embedding and for the layer that scores the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.scores = nn.Linear(WIDTH, WORDS, bias=False)
        self.scores.weight = self.words.weight

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        scores = self.scores(x + self.words(ids).mean(1))
        return x + F.pad(scores, (0, WIDTH - WORDS))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.words(ids).mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, WIDTH, batch_first=True)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.lstm(x.view(-1, 2, 4))[0][:, -1]


class Shared(nn.Module):
    """One layer under two names, run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Unused(nn.Module):
    """A layer that is trainable and gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, 2)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Sometimes(Linear):
    """A layer that gets gradients in some iterations only."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.layer(x) if int(ids[0, 0]) % 2 else x


class Frozen(nn.Module):
    """A layer that is not trainable at the start, in front of one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.fixed(x)))


class Scalar(nn.Module):
    """Parameters of no dimension and of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x * self.gain + self.nothing.sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        words = x.view(-1, 2, 4)
        return x + self.heads(words, words, words, need_weights=False)[0].flatten(1)


class Checkpointed(Linear):
    """Its forward pass runs again in the backward pass."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=False)


class Dropout(Linear):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.25, training=self.training)


class Buffer(Linear):
    """A floating-point buffer that the forward pass writes, as an average of activations does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out = self.layer(x)
        if self.training:
            with torch.no_grad():
                self.centre.copy_(0.5 * self.centre + 0.5 * out.detach().float().nan_to_num(0, 0, 0).mean(0))
        return out - self.centre.to(out.dtype)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": Linear,
    "conv and batch norm": ConvNorm,
    "batch norm": BatchNorm,
    "layer norm": LayerNorm,
    "group norm": GroupNorm,
    "instance norm": InstanceNorm,
    "tied": Tied,
    "embedding": Embedding,
    "lstm": Recurrent,
    "shared": Shared,
    "unused": Unused,
    "sometimes": Sometimes,
    "frozen": Frozen,
    "scalar": Scalar,
    "attention": Attention,
    "checkpointed": Checkpointed,
    "dropout": Dropout,
    "buffer": Buffer,
}


class Network(nn.Module):
    """The parts one after another, and heads whose outputs come in a tuple."""

    def __init__(self, parts: Sequence[str], heads: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([PARTS[name]() for name in parts])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2) for _ in range(heads)])

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        for part in self.parts:
            x = part(x, ids)
        return tuple([head(x) for head in self.heads])


def build(parts: Sequence[str], heads: int, seed: int) -> Network:
    """The same network for the same arguments."""
    torch.default_generator.manual_seed(seed)
    return Network(parts, heads)


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, words and targets.  # f32[4, 8], i64[4, 3], f32[4, 2]"""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(ROWS, WIDTH, generator=generator),
        torch.randint(WORDS, (ROWS, 3), generator=generator),
        torch.randn(ROWS, 2, generator=generator),
    )
