"""What a state holds and a load changes, beside the resumes of ``tests/laws``; what does not fit changes nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import halfpeak
from reliability.support import LEVELS, OPTIMIZERS, batch, net, state_hash, train


def build(
    level: str, optimizer: str = "SGD", *, every: int = 1, seed: int = 0, **options: Any
) -> halfpeak.Engine:
    model = net(norm="batch", seed=seed)
    options.setdefault("scale", halfpeak.ScaleConfig(interval=4))
    return halfpeak.prepare(
        model, OPTIMIZERS[optimizer](model.parameters()), level, accumulate=every, clip=1.0, **options
    )


def with_a_weight_that_froze(level: str) -> halfpeak.Engine:
    """The gradients of those behind it stay theirs, and its own still belongs to the step."""
    engine = build(level, every=2)
    train(engine, range(3))
    next(iter(engine.models[0].parameters())).requires_grad_(False)
    return engine


def with_two_optimizers(level: str) -> halfpeak.Engine:
    model = net()
    weights = list(model.parameters())
    halves = [OPTIMIZERS["SGD"](weights[::2]), OPTIMIZERS["SGD"](weights[1::2])]
    engine = halfpeak.prepare(model, halves, level, accumulate=3)
    train(engine, range(4))
    return engine


@pytest.mark.parametrize("how", ["load", "copy"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("opened", [with_a_weight_that_froze, with_two_optimizers])
def test_an_open_window_goes_on_after_a_load_and_in_a_copy(
    opened: Callable[[str], halfpeak.Engine], level: str, how: str
) -> None:
    straight, other = opened(level), opened(level)
    if how == "copy":
        other = copy.deepcopy(other)
    else:
        train(other, range(7, 8))
        other.load_state_dict(copy.deepcopy(straight.state_dict()))
    assert state_hash(other) == state_hash(straight)
    for engine in (straight, other):
        train(engine, range(4, 9))
    assert state_hash(other) == state_hash(straight)


@pytest.mark.parametrize("level", LEVELS)
def test_a_state_holds_plain_data_only(level: str) -> None:
    engine = build(level, every=3)
    train(engine, range(4))
    allowed = (dict, list, tuple, str, int, float, bool, type(None), torch.Tensor)

    def check(value: Any) -> None:
        assert isinstance(value, allowed)
        inner = (
            value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        )
        for item in inner:
            check(item)

    check(engine.state_dict())


def set_at(*path: Any, value: Any) -> Callable[[dict[str, Any]], object]:
    """A damage: put ``value`` at a path of keys."""

    def damage(state: dict[str, Any]) -> None:
        inner: Any = state
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return damage


def drop_at(*path: Any) -> Callable[[dict[str, Any]], object]:
    """A damage: remove what is at a path of keys."""

    def damage(state: dict[str, Any]) -> None:
        inner: Any = state
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]

    return damage


KEYS = ("version", "level", "models", "optimizers", "scalers", "counters", "buffers", "window")

DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"without {key}": drop_at(key) for key in KEYS},
    "an unknown key": set_at("more", value=1),
    "a later version": set_at("version", value=99),
    "no models": set_at("models", value=[]),
    "models of another type": set_at("models", value=7),
    "a model that is none": set_at("models", 0, value=3),
    "a missing weight": drop_at("models", 0, "0.weight"),
    "an unknown weight": set_at("models", 0, "9.weight", value=torch.ones(1)),
    "a weight of another shape": set_at("models", 0, "0.weight", value=torch.ones(1)),
    "a weight that is a number": set_at("models", 0, "0.weight", value=1.0),
    "two optimizers": lambda state: state["optimizers"].append(state["optimizers"][0]),
    "an optimizer without groups": drop_at("optimizers", 0, "param_groups"),
    "an optimizer that is a list": set_at("optimizers", 0, value=[]),
    "fewer parameters": lambda state: state["optimizers"][0]["param_groups"][0]["params"].pop(),
    "a momentum of another shape": set_at("optimizers", 0, "state", 0, "momentum_buffer", value=torch.ones(1)),
    "no scaler": set_at("scalers", value=[]),
    "a scale of zero": set_at("scalers", 0, "scale", value=0.0),
    "a scale below zero": set_at("scalers", 0, "scale", value=-1.0),
    "a scale of nan": set_at("scalers", 0, "scale", value=float("nan")),
    "a scale of inf": set_at("scalers", 0, "scale", value=float("inf")),
    "a scale that is a word": set_at("scalers", 0, "scale", value="big"),
    "a scaler without its count": drop_at("scalers", 0, "clean"),
    "a count below zero": set_at("scalers", 0, "clean", value=-1),
    "a step count below zero": set_at("counters", "taken", value=-1),
    "a step count of one and a half": set_at("counters", "index", value=1.5),
    "a missing counter": drop_at("counters", "skipped"),
    "a window of another shape": set_at("window", value=[]),
    "a window without lanes": set_at("window", "lanes", value=[]),
    "an unknown phase": set_at("window", "lanes", 0, "phase", value="GONE"),
    "a gradient of another shape": set_at("window", "lanes", 0, "true_sized", 0, value=torch.ones(1)),
    "a gradient of no parameter": set_at("window", "lanes", 0, "true_sized", 99, value=torch.ones(1)),
    "a weight of integers": set_at("models", 0, "0.weight", value=torch.ones(6, 4, dtype=torch.int64)),
    "statistics of integers": set_at("models", 0, "3.running_mean", value=torch.ones(6, dtype=torch.int64)),
    "an optimizer's state of no dict": set_at("optimizers", 0, "state", value=3),
    "a parameter's state of no dict": set_at("optimizers", 0, "state", 0, value=3),
    "a momentum that is a word": set_at("optimizers", 0, "state", 0, "momentum_buffer", value="x"),
    "the state of no parameter": set_at("optimizers", 0, "state", 99, value={}),
    "groups of no list": set_at("optimizers", 0, "param_groups", value=3),
    "a group of no dict": set_at("optimizers", 0, "param_groups", 0, value=3),
    "a learning rate that is a word": set_at("optimizers", 0, "param_groups", 0, "lr", value="x"),
    "parameters of no list": set_at("optimizers", 0, "param_groups", 0, "params", value=3),
    "a scaler of no dict": set_at("scalers", 0, value=3),
    "a step count beyond its dtype": set_at("counters", "taken", value=2**40),
    "a step count of true": set_at("counters", "taken", value=True),
    "statistics of no list": set_at("buffers", value=3),
    "statistics of words": set_at("buffers", value=["x"]),
    "a window of no dict": set_at("window", "lanes", 0, value=3),
    "a found_inf that is a word": set_at("window", "lanes", 0, "found_inf", value="x"),
    "three found_infs": set_at("window", "lanes", 0, "found_inf", value=torch.ones(3)),
    "gradients of no dict": set_at("window", "lanes", 0, "true_sized", value=3),
    "a gradient that is a number": set_at("window", "lanes", 0, "true_sized", 0, value=3),
    "a frozen scale of no loss": set_at("window", "lanes", 0, "frozen", value=(9, torch.ones(()))),
    "a frozen scale that is a number": set_at("window", "lanes", 0, "frozen", value=3),
    "a loss's found_inf that is a number": set_at("window", "losses", 0, value=3),
    "a loss that there is not": set_at("window", "losses", 5, value=torch.ones(())),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: str) -> None:
    source, target = build("O2", every=3), build("O2", every=3, seed=1)
    train(source, range(5))
    train(target, range(4))
    state = copy.deepcopy(source.state_dict())
    DAMAGES[damage](state)
    before, image = repr(copy.deepcopy(target.state_dict())), state_hash(target)
    with pytest.raises(halfpeak.StateError):
        target.load_state_dict(state)
    assert state_hash(target) == image
    assert repr(target.state_dict()) == before


@pytest.mark.parametrize("not_a_state", [None, 3, [], "state", {}])
def test_what_is_no_state_at_all(not_a_state: Any) -> None:
    with pytest.raises(halfpeak.StateError):
        build("O2").load_state_dict(not_a_state)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_dummy_step_of_distributed_checkpoints_counts_nothing(level: str, optimizer: str) -> None:
    """``get_optimizer_state_dict`` steps a fresh optimizer with zero gradients, to make its state."""
    saved, calm = build(level, optimizer), build(level, optimizer)
    model = saved.model
    before = state_hash(saved.models, saved.scalers, int(saved.num_steps), saved.micro_step)
    # Torch would not find masters among the parameters of the model: the step comes before that is refused.
    with contextlib.suppress(halfpeak.OrderError):
        get_optimizer_state_dict(model, saved.optimizers[0])
    assert state_hash(saved.models, saved.scalers, int(saved.num_steps), saved.micro_step) == before
    assert all(parameter.grad is None for parameter in [*model.parameters(), *saved.main_params()])
    assert [group["lr"] for group in saved.optimizers[0].param_groups] == [
        group["lr"] for group in calm.optimizers[0].param_groups
    ]
    with saved.forward():
        assert model(batch(0)).isfinite().all()
    train(saved, range(2))
    train(calm, range(2))
    assert (int(saved.num_steps), saved.micro_step) == (int(calm.num_steps), calm.micro_step)
