"""Damaged state dicts are refused with ``StateError`` and change no bit, or load and can be trained on.

A few hundred by default; ``HALFPEAK_THOROUGH=1`` tries thousands.
"""

from __future__ import annotations

import copy
import os
import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import halfpeak
from halfpeak.fused import FusedAdamW
from reliability.support import OPTIMIZERS, net, state_hash, train
from support.damage import cycle, damaged, deep
from support.states import drop, put

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
    """Whether a step can follow; torch's own switches raise in the next step if they cannot be used."""
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


GROUP, ROW = ("optimizers", 0, "param_groups", 0), ("optimizers", 0, "state", 0)
KEYS = (
    "version",
    "level",
    "models",
    "parameters",
    "optimizers",
    "state_dtypes",
    "scalers",
    "counters",
    "buffers",
    "window",
)
WINDOW = ("window", "gradients", 0)
LOSS = ("window", "losses", 0, 0)

Pair = namedtuple("Pair", "a b")

DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"without {key}": drop(key) for key in KEYS},
    "an unknown key": put("more", value=1),
    "a later version": put("version", value=99),
    "no models": put("models", value=[]),
    "models of another type": put("models", value=7),
    "a model that is none": put("models", 0, value=3),
    "a missing weight": drop("models", 0, "0.weight"),
    "an unknown weight": put("models", 0, "9.weight", value=torch.ones(1)),
    "a weight of another shape": put("models", 0, "0.weight", value=torch.ones(1)),
    "a weight that is a number": put("models", 0, "0.weight", value=1.0),
    "two optimizers": lambda state: state["optimizers"].append(state["optimizers"][0]),
    "an optimizer without groups": drop("optimizers", 0, "param_groups"),
    "an optimizer that is a list": put("optimizers", 0, value=[]),
    "fewer parameters": lambda state: state["optimizers"][0]["param_groups"][0]["params"].pop(),
    "a moment of another shape": put("optimizers", 0, "state", 0, "exp_avg", value=torch.ones(1)),
    "no moments": put("optimizers", 0, "state", value={}),
    "dtypes of an optimizer's state that are a word": put("state_dtypes", 0, value="x"),
    "no scaler": put("scalers", value=[]),
    "a scale of zero": put("scalers", 0, "scale", value=0.0),
    "a scale below zero": put("scalers", 0, "scale", value=-1.0),
    "a scale of nan": put("scalers", 0, "scale", value=float("nan")),
    "a scale of inf": put("scalers", 0, "scale", value=float("inf")),
    "a scale that is a word": put("scalers", 0, "scale", value="big"),
    "a scaler without its count": drop("scalers", 0, "clean"),
    "a count below zero": put("scalers", 0, "clean", value=-1),
    "a step count below zero": put("counters", "num_steps", value=-1),
    "a step count of one and a half": put("counters", "micro_step", value=1.5),
    "a missing counter": drop("counters", "num_skipped"),
    "a window of another shape": put("window", value=[]),
    **{f"a window without {key}": drop("window", key) for key in ("gradients", "num_gradients", "losses")},
    "a window without optimizers": put("window", "gradients", value=[]),
    "an unknown key in the window": put("window", "more", value=1),
    "a gradient of another shape": put(*WINDOW, 0, value=torch.ones(1)),
    "a gradient of no parameter": put(*WINDOW, 99, value=torch.ones(1)),
    "a weight of integers": put("models", 0, "0.weight", value=torch.ones(6, 4, dtype=torch.int64)),
    "statistics of integers": put("models", 0, "3.running_mean", value=torch.ones(6, dtype=torch.int64)),
    "an optimizer's state of no dict": put("optimizers", 0, "state", value=3),
    "a parameter's state of no dict": put("optimizers", 0, "state", 0, value=3),
    "a moment that is a word": put("optimizers", 0, "state", 0, "exp_avg", value="x"),
    "the state of no parameter": put("optimizers", 0, "state", 99, value={}),
    "groups of no list": put("optimizers", 0, "param_groups", value=3),
    "a group of no dict": put("optimizers", 0, "param_groups", 0, value=3),
    "a learning rate that is a word": put("optimizers", 0, "param_groups", 0, "lr", value="x"),
    "parameters of no list": put("optimizers", 0, "param_groups", 0, "params", value=3),
    "a scaler of no dict": put("scalers", 0, value=3),
    "a step count beyond its dtype": put("counters", "num_steps", value=2**40),
    "a step count of true": put("counters", "num_steps", value=True),
    "statistics of no list": put("buffers", value=3),
    "statistics of words": put("buffers", value=["x"]),
    "a window of no dict": put("window", value=3),
    "gradients of no dict": put(*WINDOW, value=3),
    "a gradient that is a number": put(*WINDOW, 0, value=3),
    "losses of no dict": put("window", "losses", 0, value=3),
    "a loss that is a number": put(*LOSS, value=3),
    "a loss without a scale": put(*LOSS, value=lambda found: found[:1]),
    "a found_inf that is a word": put(*LOSS, 0, value="x"),
    "three found_infs": put(*LOSS, 0, value=torch.ones(3)),
    "a scale of a loss that is a number": put(*LOSS, 1, value=3),
    "a loss that there is not": put("window", "losses", 0, 5, value=[torch.ones(())] * 3),
    "a loss with a word for a number": put("window", "losses", 0, "x", value=[torch.ones(())] * 3),
    "a length of the window that is a word": put("window", "accumulate", value="x"),
    "a length of the window of zero": put("window", "accumulate", value=0),
    "a parameter that there is not": put("parameters", 0, 99, value=torch.ones(1)),
    "a parameter of another shape": put("parameters", 0, 0, value=torch.ones(1)),
    "a parameter that is a number": put("parameters", 0, 0, value=3),
    "unhashable parameters": put(*GROUP, "params", value=lambda ids: [[one] for one in ids]),
    "a parameter twice": put(*GROUP, "params", value=lambda ids: [0, *ids[:-1]]),
    "no learning rate": put(*GROUP, value=lambda group: {k: v for k, v in group.items() if k != "lr"}),
    "a learning rate of many elements": put(*GROUP, "lr", value=lambda lr: torch.tensor(lr).expand(8)),
    "a learning rate of nan": put(*GROUP, "lr", value=lambda lr: float("nan")),
    "a beta of one": put(*GROUP, "betas", value=lambda betas: (1.0, 0.9)),
    "a count of steps below zero": put(*ROW, "step", value=lambda step: -step),
    "a count of steps that is no number": put(*ROW, "step", value=lambda step: step * float("nan")),
    "a count of steps in eight bits": put(*ROW, "step", value=lambda step: step.to(torch.float8_e4m3fn)),
    "one count of steps of another type": put(*ROW, "step", value=float),
    "a moment that is missing": put(*ROW, value=lambda row: {k: v for k, v in row.items() if k != "exp_avg"}),
    "a moment that shares its memory": put(*ROW, "exp_avg", value=lambda old: old[:1, :1].expand(old.shape)),
    "a moment without memory": put(*ROW, "exp_avg", value=lambda old: old.to("meta")),
    "a moment without a name": put(*ROW, value=lambda row: {**row, 99: torch.ones(3)}),
    "a state nested too deeply": put(*ROW, value=lambda row: {**row, "more": deep(5000)}),
    "a state that is a named tuple": put(*ROW, value=lambda row: {**row, "more": Pair(1.0, 2.0)}),
    "a state that holds itself": put(*ROW, value=lambda row: {**row, "more": cycle()}),
    "one sparse weight": put("models", 0, "0.weight", value=torch.Tensor.to_sparse),
    "one complex weight": put("models", 0, "0.weight", value=lambda weight: weight.to(torch.complex64)),
    "one quantized weight": put(
        "models", 0, "0.weight", value=lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8)
    ),
    "a version that is a tensor": put("version", value=lambda version: torch.tensor([1, 1])),
    "a counter of many digits": put("counters", "num_steps", value=lambda count: 10**5000),
    "a gradient of another dtype": put(*WINDOW, 0, value=torch.Tensor.double),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # torch 2.13, once per process
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: str) -> None:
    source, target = build("O2", "AdamW"), build("O2", "AdamW", seed=1)
    train(source, range(5))
    train(target, range(4))
    state = copy.deepcopy(source.state_dict())
    DAMAGES[damage](state)
    before, image = repr(copy.deepcopy(target.state_dict())), state_hash(target, target.state_dict())
    with pytest.raises(halfpeak.StateError):
        target.load_state_dict(state)
    assert state_hash(target, target.state_dict()) == image
    assert repr(target.state_dict()) == before


@pytest.mark.parametrize("not_a_state", [None, 3, [], "state", {}])
def test_what_is_no_state_at_all(not_a_state: Any) -> None:
    with pytest.raises(halfpeak.StateError):
        build("O2", "SGD").load_state_dict(not_a_state)


class OwnFormat(torch.optim.SGD):
    """Writes states as pytorch_optimizer's Lookahead does."""

    def state_dict(self) -> dict[str, Any]:
        return {"lookahead_state": {}, "base_optimizer": super().state_dict()}


def test_a_state_that_could_not_be_loaded_is_not_saved() -> None:
    model = net()
    engine = halfpeak.prepare(model, OwnFormat(model.parameters(), lr=0.1), "O1")
    with pytest.raises(
        halfpeak.StateError, match=r"OwnFormat.*'lookahead_state', 'base_optimizer'.*timm\.optim"
    ):
        engine.state_dict()
