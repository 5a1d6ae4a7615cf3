"""The engine has the bits of loops written by hand in plain torch; ``tests/laws`` compares the front ends with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import halfpeak
from support.by_hand import History, train_by_hand
from support.nets import LOW, OPTIMIZERS, make_batch, make_net, overflowing
from support.snapshot import values

STEPS = 25
OVERFLOWS = (3, 4, 11, 24)
"""Steps whose gradients get an inf; the first at O1 to O3 also overflow by themselves at a scale of 65536."""


def overflowing_at(net: nn.Sequential, step: int) -> AbstractContextManager[None]:
    """At :data:`OVERFLOWS` one gradient gets an infinite element."""
    return overflowing(net[step % 2].weight) if step in OVERFLOWS else nullcontext()


def through_engine(level: str, kind: str) -> History:
    history, net = History(), make_net()
    optimizer = OPTIMIZERS[kind](net.parameters())
    engine = halfpeak.prepare(net, optimizer, level)
    for step in range(STEPS):
        x, y = make_batch(step)
        with overflowing_at(net, step):
            with engine.forward():
                loss = mse_loss(net(x), y)
            engine.backward(loss)
            result = engine.step()
        history.scales.append(float(result.scale))
        history.stepped.append(result.stepped())
    history.values = values(net, optimizer)
    return history


def by_hand(net: nn.Sequential, kind: str, forward: Callable[[Tensor], Tensor], **options: Any) -> History:
    def loss_of(step: int) -> Tensor:
        x, y = make_batch(step)
        return mse_loss(forward(x), y)

    return train_by_hand(
        net, OPTIMIZERS[kind], loss_of, STEPS, around=lambda step: overflowing_at(net, step), **options
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_o0_is_plain_torch(kind: str) -> None:
    net = make_net()
    assert through_engine("O0", kind) == by_hand(net, kind, net)


class LowNet(nn.Module):
    """``make_net`` with low-precision Linears and float32 norms, casts written out by hand."""

    def __init__(self, net: nn.Sequential, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = net, dtype
        net[0].to(dtype)
        net[4].to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        linear, norm, relu, layer_norm, last = self.net
        hidden = relu(norm(linear(x.to(self.dtype))))
        return last(layer_norm(hidden.float()).to(self.dtype)).float()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_low_models_with_masters_are_what_one_writes_by_hand(level: str, kind: str) -> None:
    net, dtype = make_net(), LOW[level]
    low, exact = LowNet(net, dtype), make_net().parameters()
    scale = 65536.0 if level == "O2" else 1.0
    assert through_engine(level, kind) == by_hand(net, kind, low, low=dtype, exact=exact, scale=scale)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def train(
    net: nn.Sequential, loss_of: Callable[[Tensor, Tensor], Tensor], update: Callable[[Tensor], None]
) -> list[bytes]:
    for step in range(STEPS):
        update(loss_of(*make_batch(step)))
    return values(net)


@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float16), ("O4", torch.bfloat16)])
def test_per_operation_casts_are_autocast_s_where_the_lists_agree(level: str, dtype: torch.dtype) -> None:
    net = two_layers()
    engine = halfpeak.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), halfpeak.LEVELS[level].replace(loss_scale=256.0)
    )

    def through_casts(x: Tensor, y: Tensor) -> Tensor:
        with engine.forward():
            return mse_loss(net(x), y)

    def engine_update(loss: Tensor) -> None:
        engine.backward(loss)
        assert engine.step().stepped()

    other = two_layers()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def through_autocast(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return mse_loss(other(x).float(), y)

    def autocast_update(loss: Tensor) -> None:
        optimizer.zero_grad()
        (loss * 256.0).backward()
        for parameter in other.parameters():
            parameter.grad *= 1 / 256.0
        optimizer.step()

    assert train(net, through_casts, engine_update) == train(other, through_autocast, autocast_update)
