"""``amp.initialize`` has the bits of a loop by hand with apex's rule: only affine batch norms stay float32 at O2 and O5."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from halfpeak import amp
from support.nets import OPTIMIZERS
from support.snapshot import values

DTYPES = {"O2": torch.float16, "O5": torch.bfloat16}
STEPS = 12


def make_net() -> nn.Sequential:
    """A layer norm, a group norm, an instance norm, and a batch norm with and without weights."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8)),
        *(nn.Conv2d(8, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Flatten()),
        *(nn.LayerNorm(64), nn.BatchNorm1d(64, affine=False), nn.Linear(64, 3)),
    )
    for module in (net[1], net[3], net[5], net[7]):
        nn.init.normal_(module.weight, 1.0, 0.3)
        nn.init.normal_(module.bias, 0.0, 0.3)
    with torch.no_grad():  # values of both low dtypes, because apex's masters start from rounded weights
        for parameter in net.parameters():
            parameter.copy_(parameter.bfloat16())
    return net


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """In one step the targets are far away, so that float16 overflows."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 3, 8, 8, generator=generator), torch.randn(16, 3, generator=generator)
    return x, y * 1e4 if step == 5 else y


def through_amp(level: str, kind: str) -> list[Any]:
    net, scales = make_net(), []
    net, optimizer = amp.initialize(net, OPTIMIZERS[kind](net.parameters()), opt_level=level, verbosity=0)
    for step in range(STEPS):
        x, y = make_batch(step)
        optimizer.zero_grad()
        with amp.scale_loss(mse_loss(net(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        scales.append(amp._amp_state.loss_scalers[0].loss_scale())
    return [scales, values(net, optimizer)]


def by_hand(level: str, kind: str) -> list[Any]:
    """Unscale into float32 masters; step and copy them back, or skip: halve the scale, and put the statistics back."""
    net, low, scales = make_net(), DTYPES[level], []
    for module in net:
        if not (isinstance(module, nn.BatchNorm2d) and module.affine):
            module.to(low)
    weights = list(net.parameters())
    masters = [w.detach().float().clone().requires_grad_() if w.dtype is low else w for w in weights]
    optimizer, scale = OPTIMIZERS[kind](masters), 65536.0 if level == "O2" else 1.0
    for step in range(STEPS):
        x, y = make_batch(step)
        statistics = [buffer.clone() for buffer in net.buffers()]
        net.zero_grad()
        (mse_loss(net(x.to(low)).float(), y) * scale).backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad = weight.grad.float() / scale  # type: ignore[union-attr]
        with torch.no_grad():
            if all(master.grad.isfinite().all() for master in masters):  # type: ignore[union-attr]
                optimizer.step()
                for weight, master in zip(weights, masters, strict=True):
                    weight.copy_(master)
            else:
                scale /= 2
                for buffer, value in zip(net.buffers(), statistics, strict=True):
                    buffer.copy_(value)
        scales.append(scale)
    return [scales, values(net, optimizer)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", DTYPES)
def test_it_is_what_one_writes_by_hand(level: str, kind: str) -> None:
    found = through_amp(level, kind)
    assert found == by_hand(level, kind)
    assert found[0][4] == found[0][5] * (2 if level == "O2" else 1)
