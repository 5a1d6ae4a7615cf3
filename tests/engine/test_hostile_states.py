"""State dicts that somebody has damaged are refused with one typed error and change no bit, or can be trained on.

A few hundred by default; ``HALFPEAK_THOROUGH=1`` tries thousands.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import halfpeak
from halfpeak.fused import FusedAdamW
from reliability.support import OPTIMIZERS, net, state_hash, train
from support.damage import damaged

CASES = 400 if os.environ.get("HALFPEAK_THOROUGH") == "1" else 30
MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    **OPTIMIZERS,
    "FusedAdamW in 8 bits": lambda parameters: FusedAdamW(parameters, lr=0.01, moments="int8"),
    "AdamW with a rate in a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
}
CELLS = [(("O0", "O2", "O5", "O3")[number % 4], name) for number, name in enumerate(MAKERS)]


def build(level: str, optimizer: str, seed: int = 0) -> halfpeak.Engine:
    model = net(norm="batch", seed=seed)
    return halfpeak.prepare(model, MAKERS[optimizer](model.parameters()), level, accumulate=3, clip=1.0)


def trainable(state: dict[str, Any]) -> bool:
    """torch's own switches say for themselves, at the next step, where they cannot be used."""
    groups = [group for one in state["optimizers"] for group in one["param_groups"]]
    return not any(group.get("differentiable") or group.get("capturable") for group in groups)


@pytest.mark.parametrize(("level", "optimizer"), CELLS)
@pytest.mark.filterwarnings("ignore")
def test_damaged_states(level: str, optimizer: str) -> None:
    source, target = build(level, optimizer), build(level, optimizer, seed=1)
    train(source, range(5))
    train(target, range(4))
    good, own = copy.deepcopy(source.state_dict()), copy.deepcopy(target.state_dict())
    image, refused = state_hash(target.state_dict()), 0
    for case in range(CASES):
        what, state = damaged(good, random.Random(f"{level} {optimizer} {case}"))
        try:
            target.load_state_dict(state)
        except halfpeak.StateError:
            refused += 1
            assert state_hash(target.state_dict()) == image, what
        except Exception as error:
            raise AssertionError(what) from error
        else:
            if trainable(state):
                train(target, range(5, 7))
            target.load_state_dict(own)
            image = state_hash(target.state_dict())
    assert refused > CASES // 2


def at(*path: Any, value: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """A damage: what is at a path of keys, replaced by what ``value`` makes of it."""

    def damage(state: dict[str, Any]) -> None:
        inner: Any = state
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value(inner[path[-1]])

    return damage


GROUP, ROW = ("optimizers", 0, "param_groups", 0), ("optimizers", 0, "state", 0)
NAMED: dict[str, Callable[[dict[str, Any]], None]] = {
    "unhashable parameters": at(*GROUP, "params", value=lambda ids: [[one] for one in ids]),
    "a parameter twice": at(*GROUP, "params", value=lambda ids: [0, *ids[:-1]]),
    "no learning rate": at(*GROUP, value=lambda group: {k: v for k, v in group.items() if k != "lr"}),
    "a learning rate of many elements": at(*GROUP, "lr", value=lambda lr: torch.tensor(lr).expand(8)),
    "a learning rate of nan": at(*GROUP, "lr", value=lambda lr: float("nan")),
    "a beta of one": at(*GROUP, "betas", value=lambda betas: (1.0, 0.9)),
    "a count of steps below zero": at(*ROW, "step", value=lambda step: -step),
    "a count of steps that is no number": at(*ROW, "step", value=lambda step: step * float("nan")),
    "a count of steps in eight bits": at(*ROW, "step", value=lambda step: step.to(torch.float8_e4m3fn)),
    "one count of steps of another type": at(*ROW, "step", value=float),
    "a moment that is missing": at(*ROW, value=lambda row: {k: v for k, v in row.items() if k != "exp_avg"}),
    "a moment that shares its memory": at(*ROW, "exp_avg", value=lambda old: old[:1, :1].expand(old.shape)),
    "a moment without memory": at(*ROW, "exp_avg", value=lambda old: old.to("meta")),
    "a moment without a name": at(*ROW, value=lambda row: {**row, 99: torch.ones(3)}),
    "a state nested too deeply": at(*ROW, value=lambda row: {**row, "more": deep(5000)}),
    "a state that holds itself": at(*ROW, value=lambda row: {**row, "more": deep(0)}),
    "one sparse weight": at("models", 0, "0.weight", value=torch.Tensor.to_sparse),
    "one complex weight": at("models", 0, "0.weight", value=lambda weight: weight.to(torch.complex64)),
    "one quantized weight": at(
        "models", 0, "0.weight", value=lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8)
    ),
    "a version that is a tensor": at("version", value=lambda version: torch.tensor([1, 1])),
    "a counter of many digits": at("counters", "taken", value=lambda count: 10**5000),
    "a phase that is a list": at("window", "lanes", 0, "phase", value=lambda phase: []),
    "gradients in a closed window": at("window", "lanes", 0, "phase", value=lambda phase: "CLEAN"),
    "a gradient of another dtype": at("window", "lanes", 0, "true_sized", 0, value=torch.Tensor.double),
}  # fmt: skip


def deep(depth: int) -> list[Any]:
    """A list in a list in a list; with no depth, one in itself."""
    lists: list[Any] = []
    inner = lists if depth == 0 else []
    for _ in range(depth):
        inner = [inner]
    lists.append(inner)
    return lists


@pytest.mark.parametrize("damage", NAMED)
def test_what_once_raised_in_the_middle(damage: str) -> None:
    source, target = build("O5", "AdamW"), build("O5", "AdamW", seed=1)
    train(source, range(5))
    train(target, range(4))
    state, image = copy.deepcopy(source.state_dict()), state_hash(target.state_dict())
    NAMED[damage](state)
    with pytest.raises(halfpeak.StateError):
        target.load_state_dict(state)
    assert state_hash(target.state_dict()) == image
