"""The engine has the bits of loops written by hand in plain torch; ``tests/laws`` compares the front ends with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import halfpeak
from support.nets import OPTIMIZERS, make_batch, make_net, overflowing
from support.snapshot import values

STEPS = 25
OVERFLOWS = (3, 4, 11, 24)
"""Steps whose gradients get an inf; the first at O1 to O3 also overflow by themselves at a scale of 65536."""


@dataclass
class History:
    """The result of a run: everything that training has changed, the scale after each step, and which steps moved."""

    values: list[Any] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    stepped: list[bool] = field(default_factory=list)


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


def restore(net: nn.Module, kept: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in net.named_buffers():
            buffer.copy_(kept[name])


def by_hand_float32(kind: str) -> History:
    history, net = History(), make_net()
    optimizer = OPTIMIZERS[kind](net.parameters())
    for step in range(STEPS):
        x, y = make_batch(step)
        kept = {name: buffer.clone() for name, buffer in net.named_buffers()}
        with overflowing_at(net, step):
            optimizer.zero_grad()
            mse_loss(net(x), y).backward()
        finite = all(bool(p.grad.isfinite().all()) for p in net.parameters())
        if finite:
            optimizer.step()
        else:
            restore(net, kept)
        history.scales.append(1.0)
        history.stepped.append(finite)
    history.values = values(net, optimizer)
    return history


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_o0_is_plain_torch(kind: str) -> None:
    assert through_engine("O0", kind) == by_hand_float32(kind)


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


def by_hand_masters(level: str, kind: str) -> History:
    history, net = History(), make_net()
    dtype = torch.float16 if level == "O2" else torch.bfloat16
    exact = copy.deepcopy(net)
    low = LowNet(net, dtype)
    pairs = [
        (p, m.detach().clone().requires_grad_(True) if p.dtype is dtype else p)
        for p, m in zip(net.parameters(), exact.parameters(), strict=True)
    ]
    optimizer = OPTIMIZERS[kind]([master for _, master in pairs])
    scale, backoff = (65536.0, 0.5) if level == "O2" else (1.0, 1.0)
    for step in range(STEPS):
        x, y = make_batch(step)
        kept = {name: buffer.clone() for name, buffer in net.named_buffers()}
        for parameter, master in pairs:
            parameter.grad = master.grad = None
        with overflowing_at(net, step):
            (mse_loss(low(x), y) * scale).backward()
        for parameter, master in pairs:
            master.grad = parameter.grad.float() * (1 / scale)
        finite = all(bool(master.grad.isfinite().all()) for _, master in pairs)
        if finite:
            optimizer.step()
            with torch.no_grad():
                for parameter, master in pairs:
                    parameter.copy_(master)
        else:
            restore(net, kept)
            scale *= backoff
        history.scales.append(scale)
        history.stepped.append(finite)
    history.values = values(net, optimizer)
    return history


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_low_models_with_masters_are_what_one_writes_by_hand(level: str, kind: str) -> None:
    assert through_engine(level, kind) == by_hand_masters(level, kind)


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
