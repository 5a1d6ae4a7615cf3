"""What a state holds and a load changes. ``tests/laws`` tests resumes of all front ends."""

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


def assert_goes_on_alike(straight: halfpeak.Engine, resumed: halfpeak.Engine, steps: range) -> None:
    """Load the state of one engine into the other, and train both."""
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for engine in (straight, resumed):
        train(engine, steps)
    assert state_hash(resumed) == state_hash(straight)


def with_a_weight_that_froze(level: str) -> halfpeak.Engine:
    """The frozen weight's gradient still belongs to the step, and the parameters after it keep their gradients."""
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
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_leaves_a_state_that_was_loaded_as_it_is(level: str, optimizer: str) -> None:
    """A state kept in memory, as the best so far, is loaded more than once."""
    source, target = build(level, optimizer, every=2), build(level, optimizer, every=2)
    train(source, range(3))
    state = copy.deepcopy(source.state_dict())
    before = state_hash(state)
    target.load_state_dict(state)
    train(target, range(3, 8))
    assert state_hash(state) == before


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_dummy_step_of_distributed_checkpoints_counts_nothing(level: str, optimizer: str) -> None:
    """``get_optimizer_state_dict`` steps a fresh optimizer with zero gradients, to make its state."""
    saved, calm = build(level, optimizer), build(level, optimizer)
    model = saved.model
    before = state_hash(saved.models, saved.scalers, int(saved.num_steps), saved.micro_step)
    # With masters torch steps first, then the call is refused: masters are not among the model's parameters.
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


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_layer_that_was_trained_and_is_frozen_before_it_is_prepared_is_not_rounded(level: str) -> None:
    model = net()
    weights = list(model.parameters())
    optimizer = OPTIMIZERS["SGD"](weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    weights[0].requires_grad_(False)
    before = weights[0].detach().clone()
    halfpeak.prepare(model, optimizer, level)
    assert torch.equal(next(iter(model.state_dict().values())), before)


@pytest.mark.parametrize("level", LEVELS)
def test_moments_that_were_cleared_before_the_save(level: str) -> None:
    """A warm restart: every cycle begins with new moments, and a file is written between two cycles."""
    straight, resumed = build(level), build(level, seed=1)
    train(straight, range(3))
    straight.optimizers[0].state.clear()
    assert_goes_on_alike(straight, resumed, range(3, 6))


@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_that_was_dropped_before_the_save_skips_no_step(level: str) -> None:
    straight, resumed = build(level), build(level, seed=1)
    train(straight, range(2))
    with straight.forward():
        loss = straight.model(batch(2)).float().square().mean()
    straight.backward(loss * float("inf"))
    straight.optimizers[0].zero_grad()
    assert_goes_on_alike(straight, resumed, range(3, 6))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_a_load_replaces_a_window_that_is_open(factor: float, level: str, optimizer: str) -> None:
    straight, resumed = (build(level, optimizer, every=2, seed=seed) for seed in range(2))
    train(straight, range(4))
    train(resumed, [9], poison=lambda step: factor)
    assert_goes_on_alike(straight, resumed, range(4, 8))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_window_with_a_loss_that_was_not_finite_goes_on_after_a_load(level: str, optimizer: str) -> None:
    """Its step is skipped, but the loss scale does not fall."""
    scale = halfpeak.ScaleConfig(init=64.0, recovers=True)
    straight, resumed = (build(level, optimizer, every=2, seed=seed, scale=scale) for seed in range(2))
    train(straight, range(2))
    train(straight, [2], poison=lambda step: float("inf"))
    train(resumed, range(10, 12))  # a fused optimizer decides its later steps on the device
    assert_goes_on_alike(straight, resumed, range(3, 8))
    for engine in (straight, resumed):
        assert (int(engine.num_skipped), float(engine.scale)) == (1, 64.0 if level in ("O1", "O2") else 1.0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_layer_that_froze_inside_the_window_is_stepped_where_it_was_frozen_before_it_was_prepared(
    level: str,
) -> None:
    def plain(*, frozen: bool) -> halfpeak.Engine:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # has no state that tells who was trained
        model[0].requires_grad_(not frozen)
        return halfpeak.prepare(model, optimizer, level, accumulate=2)

    straight, resumed = plain(frozen=False), plain(frozen=True)
    train(straight, [0])
    straight.model[0].requires_grad_(False)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    before = [value.clone() for value in straight.model[0].state_dict().values()]
    for engine in (straight, resumed):
        train(engine, range(1, 6))
    assert not any(map(torch.equal, straight.model[0].state_dict().values(), before))
    for own, expected in zip(
        resumed.model.state_dict().values(), straight.model.state_dict().values(), strict=True
    ):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("saved", [2, 3, 4])
@pytest.mark.parametrize("level", LEVELS)
def test_a_state_from_between_two_windows_begins_one_of_another_length(level: str, saved: int) -> None:
    source, target = build(level, every=saved), build(level, every=5)
    train(source, range(2 * saved))
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    steps = int(target.num_steps) + int(target.num_skipped)
    for step in range(5):
        assert int(target.num_steps) + int(target.num_skipped) == steps
        train(target, [step])
    assert int(target.num_steps) + int(target.num_skipped) == steps + 1


def test_a_state_from_inside_a_window_of_another_length_is_refused() -> None:
    source, target = build("O2", every=3), build("O2", every=2)
    train(source, range(4))
    before = state_hash(target)
    with pytest.raises(
        halfpeak.StateError, match=r"inside a window of accumulate=3.*load it with accumulate=3"
    ):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert state_hash(target) == before


def test_a_window_whose_gradients_were_dropped_goes_on_where_it_was() -> None:
    straight, resumed = build("O2", every=3), build("O2", every=3, seed=1)
    train(straight, range(4))
    straight.optimizers[0].zero_grad()
    assert_goes_on_alike(straight, resumed, range(4, 9))
