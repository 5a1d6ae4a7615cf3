"""Loading a state dict is the identity: a resumed run takes, bit for bit, the steps of the one that was never stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfpeak
from halfpeak import amp

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, fused=True),
}

BATCHES = torch.randn(10, 8, 4, generator=torch.Generator().manual_seed(1))
BATCHES[2] = 1e30
"""The third one overflows in every low dtype's forward or backward pass."""


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.LayerNorm(6), nn.Linear(6, 2))
    return model, OPTIMIZERS[name](model.parameters())


def train(engine: halfpeak.Engine, batches: Iterable[Tensor]) -> None:
    for x in batches:
        with engine.forward():
            loss = engine.model(x).float().square().mean()
        engine.backward(loss)
        engine.step()


def stepped(optimizer: torch.optim.Optimizer) -> list[tuple[torch.dtype, list[Any]]]:
    """The parameters that an optimizer steps and its state: what decides every later step."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for p in parameters for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return [(tensor.dtype, tensor.detach().tolist()) for tensor in (*parameters, *states)]


@pytest.mark.parametrize("level", halfpeak.LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stop", [4, 5], ids=["between windows", "inside a window"])
def test_an_engine_resumes(level: str, name: str, stop: int) -> None:
    whole = halfpeak.prepare(*build(name), level, accumulate=2)
    first = halfpeak.prepare(*build(name), level, accumulate=2)
    train(whole, BATCHES)
    train(first, BATCHES[:stop])
    state = copy.deepcopy(first.state_dict())

    second = halfpeak.prepare(*build(name), level, accumulate=2)
    second.load_state_dict(state)
    assert repr(second.state_dict()) == repr(state)
    train(second, BATCHES[stop:])
    assert repr(stepped(second.optimizers[0])) == repr(stepped(whole.optimizers[0]))
    assert repr(second.state_dict()) == repr(whole.state_dict())


@pytest.mark.parametrize("level", halfpeak.LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_dicts_resume_a_run_of_amp(level: str, name: str) -> None:
    """apex's own recipe: model, optimizer and amp."""
    whole = run_amp(level, name, BATCHES)
    model, optimizer = run_amp(level, name, BATCHES[:5])
    scalers = {"loss_scaler0": amp._amp_state.loss_scalers[0].state_dict()}
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    model, optimizer = amp.initialize(*build(name), opt_level=level, verbosity=0)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(scalers)
    train_amp(model, optimizer, BATCHES[5:])
    assert repr(stepped(optimizer)) == repr(stepped(whole[1]))
    assert repr(model.state_dict()) == repr(whole[0].state_dict())


def run_amp(level: str, name: str, batches: Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = amp.initialize(*build(name), opt_level=level, verbosity=0)
    train_amp(model, optimizer, batches)
    return model, optimizer


def train_amp(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Tensor) -> None:
    for x in batches:
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
