"""Promise 6: a run that is saved anywhere between two calls and resumed is the same run, to the bit.

``tests/laws`` resumes the runs of all front ends after every pass.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import halfpeak
from halfpeak import Engine
from promises.cases import batch
from reliability.support import OPTIMIZERS, state_hash
from support.nets import LEVELS, MASTERED
from support.states import differences, same, through_a_file

SCALE = halfpeak.ScaleConfig(init=1024.0, interval=4, recovers=True)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2)
    )


def build(level: str, optimizer: str = "AdamW", *, seed: int = 0, every: int = 1, **options: Any) -> Engine:
    model = network(seed)
    made = OPTIMIZERS[optimizer](list(model.parameters())[:-2])
    return halfpeak.prepare(
        model, made, level, accumulate=every, scale=SCALE, num_losses=2, **{"clip": 1.0, **options}
    )


def passes(engine: Engine, seed: int, factor: float = 1.0, loss_id: int = 0) -> None:
    with engine.forward():
        loss = engine.model(batch(seed)).float().square().mean()
    engine.backward(loss * factor, loss_id=loss_id)


def train(engine: Engine, seeds: range, factor: float = 1.0) -> None:
    for seed in seeds:
        passes(engine, seed, factor, loss_id=seed % 2)
        engine.step()


def overflow_in_backward(engine: Engine) -> None:
    handle = engine.model[2].weight.register_hook(lambda grad: grad * math.inf)
    passes(engine, 20)
    handle.remove()


def loss_that_is_not_finite(engine: Engine) -> None:
    """Its gradients are."""
    with engine.forward():
        loss = engine.model(batch(20)).float().square().mean() + math.inf
    engine.backward(loss)


def clamp_what_overflowed(engine: Engine) -> None:
    overflow_in_backward(engine)
    engine.unscale()
    nn.utils.clip_grad_value_(engine.model.parameters(), 1.0)


def clear_moments(engine: Engine) -> None:
    """A warm restart: every cycle begins with new moments, and a file is written between two cycles."""
    engine.optimizers[0].state.clear()


def edit_gradients(engine: Engine) -> None:
    passes(engine, 20)
    engine.unscale()
    nn.utils.clip_grad_norm_(engine.model.parameters(), 0.01)


@torch.no_grad()
def write_weights(engine: Engine) -> None:
    for parameter in engine.model.parameters():
        parameter.clamp_(-0.25, 0.25)


@torch.no_grad()
def write_masters(engine: Engine) -> None:
    for main in engine.main_params():
        main.mul_(0.75)


def write_data(engine: Engine) -> None:
    """Not followed by masters: the run steps on from these, and so does the resumed one."""
    for parameter in engine.model.parameters():
        parameter.data.mul_(0.5)


def freeze(engine: Engine) -> None:
    passes(engine, 20)
    freeze_also(engine)


def freeze_also(engine: Engine) -> None:
    engine.model[0].requires_grad_(False)


def add_group(engine: Engine) -> None:
    passes(engine, 20)
    add_group_also(engine)


def add_group_also(engine: Engine) -> None:
    engine.optimizers[0].add_param_group({"params": list(engine.model[4].parameters())})


def past_the_engine(engine: Engine) -> None:
    passes(engine, 20)
    engine.unscale()
    with engine.forward():
        loss = engine.model(batch(21)).float().square().mean()
    loss.backward()


def loss_of_another(engine: Engine) -> None:
    """Its gradients are saved, and that it overflowed; but nobody lowers its scale after a resume."""
    other = nn.Linear(4, 4)
    of_other = halfpeak.prepare(
        other, torch.optim.SGD(other.parameters(), lr=0.1), halfpeak.LEVELS["O0"].replace(loss_scale=64.0)
    )
    with engine.forward():
        loss = engine.model(other(batch(20))).float().square().mean() * math.inf
    of_other.backward(loss)


MOMENTS: dict[str, tuple[Callable[[Engine], object], Callable[[Engine], object]]] = {
    "between two steps": (lambda engine: None, lambda engine: None),
    "before the step": (lambda engine: passes(engine, 20), lambda engine: None),
    "after unscale": (lambda engine: (passes(engine, 20), engine.unscale()), lambda engine: None),
    "after a pass of another loss": (lambda engine: passes(engine, 20, loss_id=1), lambda engine: None),
    "after a forward pass": (lambda engine: engine.model(batch(20)), lambda engine: None),
    "after an overflow": (overflow_in_backward, lambda engine: None),
    "after a loss that was not finite": (lambda engine: passes(engine, 20, math.nan), lambda engine: None),
    "after an infinite loss with finite gradients": (loss_that_is_not_finite, lambda engine: None),
    "after an overflow was clamped": (clamp_what_overflowed, lambda engine: None),
    "after a skip": (lambda engine: (overflow_in_backward(engine), engine.step()), lambda engine: None),
    "after model.zero_grad": (
        lambda engine: (passes(engine, 20, math.inf), engine.model.zero_grad()),
        lambda engine: None,
    ),
    "after optimizer.zero_grad": (
        lambda engine: (passes(engine, 20, math.inf), engine.optimizers[0].zero_grad()),
        lambda engine: None,
    ),
    "after abort": (lambda engine: (passes(engine, 20), engine.abort()), lambda engine: None),
    "after an edit of gradients": (edit_gradients, lambda engine: None),
    "after a pass past the engine": (past_the_engine, lambda engine: None),
    "after a loss of another engine": (loss_of_another, lambda engine: None),
    "weights written": (write_weights, lambda engine: None),
    "masters written": (write_masters, lambda engine: None),
    "weights written through data": (write_data, lambda engine: None),
    "a layer frozen": (freeze, freeze_also),
    "a group added": (add_group, add_group_also),
    "moments cleared": (clear_moments, lambda engine: None),
}
"""What is done before the run is saved, and what the script that resumes it has done, too."""

ROWS = [
    (moment, level, list(OPTIMIZERS)[(i + j + k) % len(OPTIMIZERS)], every, before)
    for i, moment in enumerate(MOMENTS)
    for j, level in enumerate(LEVELS)
    for k, (every, before) in enumerate(((1, 0), (1, 3), (3, 3), (3, 4), (2, 5)))
]


@pytest.mark.parametrize(("moment", "level", "optimizer", "every", "before"), ROWS)
def test_a_resumed_run_is_the_same_run(
    moment: str, level: str, optimizer: str, every: int, before: int
) -> None:
    """It is loaded into a run that is in the middle of something else."""
    act, also = MOMENTS[moment]
    straight, resumed = (build(level, optimizer, every=every, seed=seed) for seed in range(2))
    train(straight, range(before))
    act(straight)
    train(resumed, range(50, 50 + every))
    passes(resumed, 60, math.inf)
    also(resumed)
    state = through_a_file(straight.state_dict())
    resumed.load_state_dict(state)
    image = state_hash(state)
    for seed in range(before, before + 6):
        # Before its first step an optimizer may have moments of zero, or none.
        assert not before or not differences(straight.state_dict(), resumed.state_dict())
        for engine in (straight, resumed):
            passes(engine, seed)
            engine.step()
    assert not differences(straight.state_dict(), resumed.state_dict())
    assert state_hash(state) == image  # a state kept in memory can be loaded again


def two_optimizers(level: str) -> Engine:
    model = network()
    members = list(model.parameters())
    halves = [OPTIMIZERS["SGD"](members[::2]), OPTIMIZERS["FusedAdamW"](members[1::2])]
    return halfpeak.prepare(model, halves, level, accumulate=3, scale=SCALE, num_losses=2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("before", range(4))
def test_a_run_with_two_optimizers(level: str, before: int) -> None:
    straight, resumed = two_optimizers(level), two_optimizers(level)
    train(straight, range(before))
    overflow_in_backward(straight)
    train(resumed, range(7, 8))
    resumed.load_state_dict(through_a_file(straight.state_dict()))
    for engine in (straight, resumed):
        train(engine, range(before, 9))
    assert not differences(straight.state_dict(), resumed.state_dict())


# The parts of a state, saved and loaded apart.


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("window", [True, False])
def test_model_optimizer_and_loop_apart_in_any_order(
    level: str, optimizer: str, model_first: bool, window: bool
) -> None:
    straight, resumed = (build(level, optimizer, every=2, seed=seed) for seed in range(2))
    train(straight, range(3 if window else 4))
    of_model, of_optimizer, of_loop = through_a_file(
        (
            straight.model.state_dict(),
            straight.optimizers[0].state_dict(),
            straight.loop_state_dict(window=window),
        )
    )
    loads: list[Callable[[], object]] = [
        lambda: resumed.model.load_state_dict(of_model),
        lambda: resumed.optimizers[0].load_state_dict(of_optimizer),
        lambda: resumed.load_loop_state_dict(of_loop),
    ]
    for load in loads if model_first else reversed(loads):
        load()
    for engine in (straight, resumed):
        train(engine, range(4, 9))
    assert not differences(straight.state_dict(), resumed.state_dict())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("saved", [2, 3, 4])
def test_a_state_from_between_two_windows_begins_one_of_another_length(level: str, saved: int) -> None:
    source, target = build(level, every=saved), build(level, every=5)
    train(source, range(2 * saved))
    target.load_state_dict(through_a_file(source.state_dict()))
    done = int(target.num_steps) + int(target.num_skipped)
    for number in range(5):
        train(target, range(number, number + 1))
        assert int(target.num_steps) + int(target.num_skipped) == done + (number == 4)


@pytest.mark.parametrize("level", LEVELS)
def test_a_state_from_inside_a_window_of_another_length_is_refused(level: str) -> None:
    source, target = build(level, every=3), build(level, every=2)
    train(source, range(4))
    before = state_hash(target)
    with pytest.raises(halfpeak.StateError, match=r"window of accumulate=3.*load it with accumulate=3"):
        target.load_state_dict(through_a_file(source.state_dict()))
    assert state_hash(target) == before


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "O3"])  # whose steps round
def test_an_open_window_goes_on_with_torchs_optimizer_and_back(level: str) -> None:
    fused, other = build(level, "FusedAdamW"), build(level, "AdamW fused")
    train(fused, range(3))
    for source, target, seed in ((fused, other, 3), (other, fused, 6)):
        passes(source, seed)
        target.load_state_dict(through_a_file(source.state_dict()))
        for engine in (fused, other):
            engine.step()
            train(engine, range(seed + 1, seed + 3))
        for one, two in zip(fused.main_params(), other.main_params(), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_dummy_step_of_distributed_checkpoints_counts_nothing(level: str, optimizer: str) -> None:
    """``get_optimizer_state_dict`` steps a fresh optimizer with zero gradients, to make its state."""
    engine, calm = build(level, optimizer), build(level, optimizer)
    before = state_hash(engine.models, engine.scalers, int(engine.num_steps), engine.micro_step)
    # With masters torch steps first, and then does not find them: they are not among the model's parameters.
    with contextlib.suppress(KeyError):
        get_optimizer_state_dict(engine.model, engine.optimizers[0])
    assert state_hash(engine.models, engine.scalers, int(engine.num_steps), engine.micro_step) == before
    assert not engine.is_open
    for one in (engine, calm):
        train(one, range(2))
    assert (int(engine.num_steps), engine.micro_step) == (int(calm.num_steps), calm.micro_step)


@pytest.mark.parametrize("level", MASTERED)
def test_a_layer_that_is_frozen_when_it_is_prepared_is_not_rounded(level: str) -> None:
    model = network()
    model[0].requires_grad_(False)
    before: list[Tensor] = [value.clone() for value in model[0].state_dict().values()]
    engine = halfpeak.prepare(model, OPTIMIZERS["SGD"](model.parameters()), level)
    train_one = engine.model(batch(0)).float().square().mean()
    engine.backward(train_one)
    engine.step()
    assert same(model[0].state_dict().values(), before)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", ["FusedAdamW", "FusedSGD"])
def test_what_a_skipped_first_step_has_laid_out_changes_no_bit(level: str, optimizer: str) -> None:
    """It makes state of a layer that is then frozen, and torch's loops round an element by its place in a buffer."""

    def run() -> Engine:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 5))
        return halfpeak.prepare(model, OPTIMIZERS[optimizer](model.parameters()), level, scale=SCALE)

    def train_on(engine: Engine, seed: int) -> None:
        x = torch.randn(16, 7, generator=torch.Generator().manual_seed(seed))
        with engine.forward():
            loss = engine.model(x).float().square().mean()
        engine.backward(loss * math.inf if seed == 0 else loss)
        engine.step()

    straight = run()
    train_on(straight, 0)
    for _ in range(2):
        resumed = run()
        for one in (straight, resumed):
            one.model[1].requires_grad_(False)
        resumed.load_state_dict(through_a_file(straight.state_dict()))
        assert not differences(straight.state_dict(), resumed.state_dict())
        for seed in range(1, 6):
            for one in (straight, resumed):
                one.model[1].requires_grad_(seed == 5)
                train_on(one, seed)
        assert not differences(straight.state_dict(), resumed.state_dict())


@pytest.mark.parametrize("level", LEVELS)
def test_a_state_can_be_loaded_twice_into_the_same_run(level: str) -> None:
    engine, ends = build(level, every=3), list[Any]()
    train(engine, range(4))
    state = copy.deepcopy(engine.state_dict())
    for _ in range(2):
        engine.load_state_dict(state)
        train(engine, range(4, 9))
        ends.append(copy.deepcopy(engine.state_dict()))
    assert not differences(*ends)


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_of_no_model_is_in_the_state(level: str) -> None:
    """Such as learnable weights of losses."""

    def made() -> tuple[nn.Parameter, Engine]:
        model, weights = network(), nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.Adam([*model.parameters(), weights], lr=0.05, eps=1e-4)
        return weights, halfpeak.prepare(model, optimizer, halfpeak.LEVELS[level].replace(loss_scale=8.0))

    def train_on(weights: nn.Parameter, engine: Engine) -> None:
        with engine.forward():
            loss = engine.model(batch(0)).float().square().mean()
        engine.backward(loss * torch.exp(-weights[0]) + weights.square().sum() + weights.sum())
        engine.step()

    weights, engine = made()
    train_on(weights, engine)
    state = through_a_file(engine.state_dict())
    train_on(weights, engine)
    others, other = made()
    other.load_state_dict(state)
    train_on(others, other)
    assert torch.equal(weights, others)
    assert same(list(engine.model.state_dict().values()), list(other.model.state_dict().values()))


@pytest.mark.parametrize("level", MASTERED)
def test_masters_go_by_optimizer_and_place(level: str) -> None:
    """Also where the saving run added a group later than the resumed one, and a weight was written through ``.data``."""

    def made(*, late: bool) -> tuple[nn.ModuleList, Engine]:
        torch.manual_seed(0)
        nets = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets[:2]]
        groups = {"params": list(nets[2].parameters())}
        if not late:
            optimizers[0].add_param_group(groups)
        engine = halfpeak.prepare(nets, optimizers, level)
        if late:
            optimizers[0].add_param_group(groups)
        return nets, engine

    (nets, engine), (others, other) = made(late=True), made(late=False)
    with engine.forward():
        outputs = [net(torch.ones(2, 4, dtype=net.weight.dtype)) for net in nets]
        loss = torch.cat(outputs).float().square().mean()
    engine.backward(loss)
    engine.step()
    nets[2].weight.data.mul_(1.5)  # type: ignore[operator]
    masters = [main.clone() for main in engine.main_params()]
    other.load_state_dict(through_a_file(engine.state_dict()))
    assert same(masters, other.main_params())
    assert same(list(nets.parameters()), list(others.parameters()))
