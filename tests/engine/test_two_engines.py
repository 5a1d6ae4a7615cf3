"""Two engines in one process: a loss of one may reach what the other steps, and each computes in its own precision."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak.engine.optimizer import prepared_here
from halfpeak.fused import FusedAdamW

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
SCALE = 1024.0


def _sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def _fused(module: nn.Module) -> FusedAdamW:
    return FusedAdamW(module.parameters(), lr=0.01)


def _networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def _fake_loss(generator: nn.Module, critic: nn.Module) -> Tensor:
    return critic(generator(torch.linspace(-1, 1, 18).view(6, 3))).float().square().mean()


def _real_loss(critic: nn.Module) -> Tensor:
    return critic(torch.linspace(-1, 2, 24).view(6, 4)).float().mean()


def _furthest(left: nn.Module, right: nn.Module) -> float:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [_sgd, _fused])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_through_the_other_network_then_its_own_loss_then_both_step(
    level: str, make: type, accumulate: int
) -> None:
    """As in plain torch: the critic's gradients are those of both losses, unscaled."""
    networks = _networks()
    plain = copy.deepcopy(networks)
    plain_optimizers = [make(network) for network in plain]
    engines = [
        halfpeak.prepare(network, make(network), level, loss_scale=SCALE, accumulate=accumulate)
        for network in networks
    ]
    for _ in range(3):
        for _ in range(accumulate):
            with engines[0].forward():
                loss = _fake_loss(*networks)
            engines[0].backward(loss)
            engines[0].step()
            with engines[1].forward():
                loss = _real_loss(networks[1])
            engines[1].backward(loss)
            engines[1].step()
        for _ in range(accumulate):
            (_fake_loss(*plain) / accumulate).backward()
            (_real_loss(plain[1]) / accumulate).backward()
        for optimizer in plain_optimizers:
            optimizer.step()
            optimizer.zero_grad()
    tolerance = {"O0": 1e-6}.get(level, 0.03)
    assert all(_furthest(*pair) <= tolerance for pair in zip(networks, plain, strict=True))


def test_an_engine_that_is_collected_in_the_middle_of_a_step_of_another() -> None:
    """What a step has found lives until it has gone through it, although only a cycle holds it."""
    forgotten = nn.Linear(2, 2)
    forgotten.engine = halfpeak.prepare(forgotten, _sgd(forgotten), "O0")  # type: ignore[assignment]
    found = prepared_here()
    del forgotten
    gc.collect()
    assert all(one.optimizer is optimizer for one, optimizer in found.items())
