"""Steps of user code, which hooks on ``Optimizer.step`` bring into order: here through amp, with a loop by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfpeak
from halfpeak import amp
from promises.by_hand import ByHand
from promises.cases import Around, adam, batch, two_layers
from support.nets import LEVELS, LOW, MASTERED
from support.states import same

SCALE = 64.0


def scaled_pass(
    model: nn.Module, optimizer: Any, seed: int, factor: float = 1.0, act: Callable[[], object] = list
) -> None:
    with amp.scale_loss(model(batch(seed)).float().square().mean() * factor, optimizer) as scaled:
        scaled.backward()
        act()


def values(*models: nn.Module) -> list[Tensor]:
    return [value.clone() for model in models for value in model.state_dict().values()]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zeroes", ["model", "optimizer"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_script_of_apex_is_the_loop_by_hand(level: str, zeroes: str, set_to_none: bool) -> None:
    """A bad batch is dropped, two passes add up, and user code clips masters."""
    (model,) = two_layers()
    optimizer = adam([model])
    amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    hand = ByHand(level, two_layers(), adam, scale=SCALE)
    for step in range(4):
        scaled_pass(model, optimizer, 100 + step)
        (model if zeroes == "model" else optimizer).zero_grad(set_to_none)
        for seed in (2 * step, 2 * step + 1):
            scaled_pass(model, optimizer, seed)
            with hand.forward():
                loss = hand.output(batch(seed)).square().mean()
            hand.backward(loss)
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.05)
        nn.utils.clip_grad_norm_(hand.tensors("optimizer"), 0.05)
        optimizer.step()
        hand.step()
        assert same(values(model), [value.float() for value in hand.values()])
        (model if zeroes == "model" else optimizer).zero_grad(set_to_none)


# Several optimizers.


def trunk_and_heads() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 1), nn.Linear(1, 3), nn.Linear(1, 5)]


def one_for_each_head(parts: list[nn.Module]) -> list[Optimizer]:
    """Each steps the trunk as well."""
    trunk, *heads = parts
    return [torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1) for head in heads]


@pytest.mark.parametrize("level", LEVELS)
def test_two_optimizers_step_by_the_gradient_of_one_trunk(level: str) -> None:
    """The first step leaves the gradients of the trunk to the second."""
    trunk, *heads = parts = trunk_and_heads()
    plain = copy.deepcopy(parts)
    optimizers, plain_optimizers = one_for_each_head(parts), one_for_each_head(plain)
    amp.initialize(parts, optimizers, opt_level=level, loss_scale=SCALE, verbosity=0)
    for seed in range(3):
        loss = sum(head(trunk(batch(seed))).float().square().mean() for head in heads)
        with amp.scale_loss(loss, optimizers) as scaled:
            scaled.backward()
        torch.as_tensor(sum(head(plain[0](batch(seed))).square().mean() for head in plain[1:])).backward()
        for optimizer in [*optimizers, *plain_optimizers]:
            optimizer.step()
        for optimizer in [*optimizers, *plain_optimizers]:
            optimizer.zero_grad()
    for one, other in zip(values(*parts), values(*plain), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3 if level in LOW else 1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_what_another_loss_left_is_stepped(level: str) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (first, second)]
    amp.initialize([first, second], optimizers, opt_level=level, verbosity=0, loss_scale=8.0)
    for _ in range(2):
        optimizers[1].zero_grad()
        scaled_pass(second, optimizers[1], 0)
        scaled_pass(nn.Sequential(first, second), optimizers[0], 1)
        for optimizer in reversed(optimizers):
            optimizer.step()
        assert all(amp.last_step(optimizer).stepped() for optimizer in optimizers)
        optimizers[0].zero_grad()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_step_inside_the_block_of_a_loss_is_refused_and_the_pass_not_begun(level: str, which: int) -> None:
    def run(*, bad: bool) -> list[Tensor]:
        models = [two_layers()[0], two_layers()[0]]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in models]
        amp.initialize(models, optimizers, opt_level=level, loss_scale=SCALE, verbosity=0)
        scaled_pass(models[1], optimizers[1], 1)
        if bad:
            with pytest.raises(halfpeak.OrderError, match=r"after the `with amp\.scale_loss` block"):
                scaled_pass(models[0], optimizers[0], 0, act=optimizers[which].step)
        scaled_pass(models[0], optimizers[0], 0)
        for optimizer in optimizers:
            optimizer.step()
        return values(*models)

    assert same(run(bad=True), run(bad=False))


# An optimizer that steps by another one over its own groups.


def sam(level: str) -> tuple[nn.Module, Around, Callable[[int, float], None]]:
    """A model, its optimizer, and a function that steps one batch by the optimizer inside, its loss times a factor."""
    (model,) = two_layers()
    optimizer = Around(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)

    def train_inner(seed: int, factor: float = 1.0) -> None:
        scaled_pass(model, optimizer, seed, factor)
        optimizer.base_optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, train_inner


@pytest.mark.parametrize("level", MASTERED)
def test_a_step_of_the_optimizer_inside_reaches_the_model(level: str) -> None:
    model, optimizer, train_inner = sam(level)
    for seed in range(2):
        before = [weight.detach().clone() for weight in model.parameters()]
        train_inner(seed, 1.0)
        assert not any(map(torch.equal, model.parameters(), before))
        for weight, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
            assert torch.equal(weight, master.to(weight.dtype))
        with torch.no_grad():  # what is written now is not overwritten by the step before
            for weight in model.parameters():
                weight.clamp_(-0.125, 0.125)
    with torch.no_grad():
        model(batch(0))
    assert all(float(weight.detach().abs().max()) <= 0.125 for weight in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_of_the_optimizer_inside_is_skipped_after_an_overflow(level: str) -> None:
    model, optimizer, train_inner = sam(level)
    scales, ends = list[float](), list[list[Tensor]]()
    for seed, factor in enumerate((1.0, math.inf, 1.0)):
        train_inner(seed, factor)
        assert amp.last_step(optimizer).stepped() is (factor == 1)
        scales.append(float(amp.state_dict()["loss_scaler0"]["loss_scale"]))
        ends.append([weight.detach().clone() for weight in model.parameters()])
    assert same(ends[1], ends[0])
    assert scales[1:] == [scales[0] / 2] * 2

    plain, _, train_inner = sam(level)
    train_inner(0, 1.0)
    train_inner(2, 1.0)
    for weight, expected in zip(ends[2], plain.parameters(), strict=True):
        torch.testing.assert_close(weight, expected.detach())


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_skip_of_a_step_with_a_closure_does_not_call_an_optimizer_that_needs_one(level: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    engine = halfpeak.prepare(model, optimizer, level, on_skip=None)

    def closure(factor: float = 1.0) -> torch.Tensor:
        with engine.forward():
            loss = model(torch.ones(3, 4)).float().square().mean() * factor
        engine.backward(loss)
        return loss

    closure(float("inf"))
    assert not engine.step(closure).stepped()
    assert int(engine.num_skipped) == 1
    assert engine.step(closure).stepped()
