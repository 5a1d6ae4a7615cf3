"""Models as people write them by hand: what they take, and what they keep in buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.measure import Member


class Rotary(nn.Module):
    """Frequencies in a buffer that is saved with the model, as older code has it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10_000.0 ** (-torch.arange(0, size, 2) / size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(x.shape[-2], device=x.device), self.inv_freq).repeat(1, 2)
        return angles.cos(), angles.sin()


class RotaryAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 64)
        self.rotary = Rotary(8)
        with torch.no_grad():
            self.qkv.weight[:64].mul_(40)  # as sharp as trained attention, or positions would not matter

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens)).unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
        cos, sin = self.rotary(q)

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat([-second, first], -1) * sin

        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return self.head(mixed.transpose(1, 2).flatten(2))


class Positions(nn.Module):
    """A table of sines and cosines, added to the embeddings."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(64, 32), _Table(persistent)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.table(self.embed(tokens)))


class _Table(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("table", _sinusoids(torch.arange(64.0)), persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.table[: x.shape[1]])


class TableInAttention(nn.Module):
    """A buffer that is not saved, and which a layer of the same module takes: relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(64, 32), nn.Linear(2, 32)
        self.register_buffer("places", torch.rand(16, 2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.project(self.places)


class FrozenBatchNorm(nn.Module):
    """A batch norm all of which lies in buffers, as detectors have it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(channels) + 0.5)
        self.register_buffer("mean", torch.randn(channels))
        self.register_buffer("var", torch.rand(channels) * 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.weight * (self.var + 1e-8).rsqrt()
        return (x - self.mean[:, None, None]) * factor[:, None, None] * 1e-3


class FourierFeatures(nn.Module):
    """Random frequencies, fixed: coordinates to values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", 8 * torch.randn(2, 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = x @ self.matrix
        return torch.cat([angles.sin(), angles.cos()], -1)


class Diffusion(nn.Module):
    """Denoises ``x`` at time ``t``, whose embedding it casts to the dtype of ``x``, as most libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.last(F.silu(self.first(x) + self.time(_sinusoids(t).to(x.dtype))))


class Flow(nn.Module):
    """Takes a time between 0 and 1 as one more feature."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x, t[:, None]], -1))


class Guided(nn.Module):
    """Takes a time through learned frequencies, and a factor for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.randn(32))
        self.first, self.time, self.last = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, t: Tensor, factor: Tensor) -> Tensor:
        hidden = self.first(x) + self.time((t[:, None] * self.frequencies).sin())
        return self.last(F.silu(hidden) * factor[:, None])


class Coordinates(nn.Module):
    """A function of one number, for a vector of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x[:, None])


class Regression(nn.Module):
    """Computes its loss itself, from labels of one number per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        output = self.net(x).squeeze(1)
        return torch.cat([output, F.mse_loss(output, labels)[None]])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(64, 16), nn.LSTM(16, 32, 2), nn.Linear(32, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def _sinusoids(t: Tensor) -> Tensor:
    angles = t[:, None].float() * torch.exp(-math.log(10_000) / 16 * torch.arange(16.0))
    return torch.cat([angles.sin(), angles.cos()], -1)


def members() -> Iterator[Member]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (2, 16), generator=draw)
    long = torch.randint(64, (1, 256), generator=draw)
    x, image = torch.randn(4, 8, generator=draw), torch.randn(2, 3, 16, 16, generator=draw)
    steps, time = torch.tensor([951, 12, 333, 777]), torch.rand(4, generator=draw)
    one, points = torch.randn(8, generator=draw), torch.rand(64, 2, generator=draw)
    wave, labels = torch.randn(2, 1, 128, generator=draw), torch.randn(4, generator=draw)
    factories = {
        "rotary attention": (RotaryAttention, (long,)),
        "table of positions": (lambda: Positions(True), (tokens,)),
        "table of positions, not saved": (lambda: Positions(False), (tokens,)),
        "table for a layer": (TableInAttention, (tokens,)),
        "frozen batch norm": (
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3), FrozenBatchNorm(8), nn.ReLU(), nn.Conv2d(8, 4, 3)),
            (image,),
        ),
        "Fourier features": (lambda: nn.Sequential(FourierFeatures(), nn.Linear(32, 3)), (points,)),
        "diffusion, whole time steps": (Diffusion, (x, steps)),
        "flow, time as a feature": (Flow, (x, time)),
        "learned frequencies, factor per sample": (Guided, (x, time, labels)),
        "coordinates, one vector": (Coordinates, (one,)),
        "regression, labels inside": (Regression, (x, labels)),
        "policy, one observation": (
            lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)),
            (one,),
        ),
        "LSTM": (Recurrent, (tokens,)),
        "convolutions over a wave": (
            lambda: nn.Sequential(nn.Conv1d(1, 8, 5), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv1d(8, 1, 5)),
            (wave,),
        ),
    }
    for name, (make, inputs) in factories.items():

        def build(make: type[nn.Module] = make) -> nn.Module:  # type: ignore[assignment]
            torch.manual_seed(0)
            return make()

        yield Member(f"by hand, {name}", build, lambda model, inputs=inputs: model(*inputs))
