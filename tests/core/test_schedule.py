"""The loss-scale rule, compared with the rules that it replaces, and at its bounds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from core.scale_models import CASES, LIMITS, Apex, Mmcv, ScaleModel
from halfpeak.core.errors import ConfigError
from halfpeak.core.schedule import ScaleConfig, ScaleState, advance, require_scale

UPDATES, HISTORIES = 3000, 5


def histories(seed: int) -> list[list[bool]]:
    """Draw overflows that are rare, frequent and in bursts, so that scales move up, down and along their bounds."""
    rng = random.Random(seed)
    drawn: list[list[bool]] = []
    for _ in range(HISTORIES):
        flags: list[bool] = []
        while len(flags) < UPDATES:
            rate = rng.choice((0.0, 0.0, 0.001, 0.05, 0.2))
            flags += [rng.random() < rate for _ in range(rng.choice((10, 100, 1000)))]
            flags += [True] * rng.choice((0, 0, 1, 3))
        drawn.append(flags[:UPDATES])
    return drawn


def scales_of(config: ScaleConfig, flags: Tensor) -> Tensor:
    """The scales after each update, of all histories at once.  # f32[updates, histories]"""
    state = ScaleState(*(part.expand(flags.shape[1]) for part in config.start()))
    scales: list[Tensor] = []
    for overflow in flags:
        state = advance(config, state, overflow)
        scales.append(state.scale)
    return torch.stack(scales)


def play(model: ScaleModel, drawn: list[bool]) -> tuple[list[bool], list[float]]:
    """Overflows, changed where the model would leave its span, and its scale after each update."""
    lowest, highest = model.span
    flags: list[bool] = []
    scales: list[float] = []
    for overflow in drawn:
        flags.append((overflow and model.scale > lowest) or model.scale >= highest)
        model.update(flags[-1])
        scales.append(float(model.scale))
    return flags, scales


@pytest.mark.parametrize("name", CASES)
def test_same_scales_as_the_other_rule(name: str) -> None:
    drawn = histories(seed=list(CASES).index(name))
    models = [CASES[name]() for _ in drawn]
    played = [play(model, flags) for model, flags in zip(models, drawn, strict=True)]
    expected = torch.tensor([scales for _, scales in played]).T
    actual = scales_of(models[0].config, torch.tensor([flags for flags, _ in played]).T.float())
    assert len(actual.unique()) > 1
    assert torch.equal(actual, expected)


PINNED = [
    (
        "mmcv 1.7.2",
        Mmcv(init=8.0, window=3),
        "000010000001111111",
        "8 8 16 16 8 8 8 16 16 16 32 16 8 4 2 1 1 1",
    ),
    ("fp16_utils", Mmcv(init=4.0, window=3), "0010000001111", "4 4 2 2 2 4 4 4 8 4 2 1 1"),
    ("apex", Apex(init=4.0, window=2, high=16.0), "000000100", "4 8 8 16 16 16 8 8 16"),
]


@pytest.mark.parametrize(
    ("model", "flags", "scales"), [row[1:] for row in PINNED], ids=[row[0] for row in PINNED]
)
def test_histories_observed_in_the_originals(model: ScaleModel, flags: str, scales: str) -> None:
    overflows = [flag == "1" for flag in flags]
    expected = [float(scale) for scale in scales.split()]
    assert play(model, overflows) == (overflows, expected)
    assert scales_of(model.config, torch.tensor(overflows).float()[:, None])[:, 0].tolist() == expected


def test_a_batch_of_states_advances_as_each_of_them() -> None:
    config = ScaleConfig(init=64.0, interval=3, hysteresis=2, floor=8.0, ceiling=256.0)
    flags = torch.tensor(histories(0)[:4]).T[:300].float()
    together = scales_of(config, flags)
    for column in range(flags.shape[1]):
        assert torch.equal(scales_of(config, flags[:, column : column + 1])[:, 0], together[:, column])


@pytest.mark.parametrize("found_inf", [1.0, 2.0, -1.0, math.inf, math.nan])
def test_any_found_inf_but_zero_is_an_overflow(found_inf: float) -> None:
    config = ScaleConfig(init=8.0)
    assert advance(config, config.start(), torch.tensor(found_inf)).scale.item() == 4.0


def test_a_static_scale_counts_and_stays() -> None:
    config = ScaleConfig.static(128.0)
    state = config.start()
    for overflow, clean, stuck in ((0.0, 1, 0), (0.0, 2, 0), (1.0, 0, 1), (1.0, 0, 2), (0.0, 1, 0)):
        state = advance(config, state, torch.tensor(overflow))
        assert (state.scale.item(), state.clean.item(), state.stuck.item()) == (128.0, clean, stuck)


def test_advance_changes_neither_state_nor_found_inf() -> None:
    config = ScaleConfig(init=8.0, interval=1)
    state, found_inf = config.start(), torch.ones(())
    before = [part.clone() for part in (*state, found_inf)]
    advance(config, state, found_inf)
    advance(config, state, torch.zeros(()))
    assert all(torch.equal(now, then) for now, then in zip((*state, found_inf), before, strict=True))


def test_state_keeps_its_dtypes() -> None:
    config = ScaleConfig(init=8.0, interval=1, hysteresis=2)
    state = config.start()
    for overflow in (0.0, 1.0, 1.0, 0.0):
        state = advance(config, state, torch.tensor(overflow))
        assert [part.dtype for part in state] == [torch.float32, torch.int32, torch.int32, torch.int32]
        assert all(part.shape == () for part in state)


def test_hysteresis_is_spent_before_the_scale_falls() -> None:
    config = ScaleConfig(init=64.0, hysteresis=3)
    flags = torch.tensor([1, 1, 1, 1, 0, 1, 1, 1]).float()[:, None]
    assert scales_of(config, flags)[:, 0].tolist() == [64, 64, 32, 16, 16, 16, 16, 8]


@pytest.mark.parametrize(
    ("scale", "overflow", "expected"),
    [(2.0**30, 0.0, 2.0**24), (2.0**30, 1.0, 2.0**29), (2.0**-20, 1.0, 2.0**-14), (2.0**-20, 0.0, 2.0**-19)],
)
def test_a_scale_beyond_its_bounds_comes_back_when_it_moves(
    scale: float, overflow: float, expected: float
) -> None:
    config = ScaleConfig(interval=1)
    state = config.start()._replace(scale=torch.tensor(scale))
    assert advance(config, state, torch.tensor(overflow)).scale.item() == expected


def test_a_counter_beyond_the_interval_grows_at_once() -> None:
    config = ScaleConfig(init=8.0, interval=10)
    state = config.start()._replace(clean=torch.tensor(1_000_000, dtype=torch.int32))
    state = advance(config, state, torch.zeros(()))
    assert (state.scale.item(), state.clean.item()) == (16.0, 0)


def test_ten_thousand_overflows() -> None:
    config = ScaleConfig(init=2.0**16)
    state, lowest = config.start(), 2.0**16
    for number in range(10_000):
        state = advance(config, state, torch.ones(()))
        lowest = max(lowest / 2, config.floor)
        if number < 40 or number == 9_999:
            assert state.scale.item() == lowest
    assert state.scale.item() == config.floor > 0
    # 30 overflows lower the scale from 2**16 to the floor of 2**-14; every later one counts as stuck.
    assert state.stuck.item() == 10_000 - 30
    state = advance(config, state, torch.zeros(()))
    assert (state.scale.item(), state.clean.item(), state.stuck.item()) == (config.floor, 1, 0)


@pytest.mark.parametrize(
    ("config", "top"),
    [(ScaleConfig(), 2.0**24), (ScaleConfig(interval=7, ceiling=LIMITS.max), 2.0**127)],
    ids=["default", "no ceiling"],
)
def test_a_million_clean_updates(config: ScaleConfig, top: float) -> None:
    """By induction: advances every state of the expected run at once, and compares each with the next state."""
    number = torch.arange(1_000_001)
    exponent = (16 + number // config.interval).clamp(max=int(math.log2(top)))
    states = ScaleState(
        scale=torch.ldexp(torch.ones(exponent.shape), exponent),
        clean=(number % config.interval).to(torch.int32),
        grace=torch.ones_like(number, dtype=torch.int32),
        stuck=torch.zeros_like(number, dtype=torch.int32),
    )
    assert all(torch.equal(part[0], first) for part, first in zip(states, config.start(), strict=True))
    after = advance(config, ScaleState(*(part[:-1] for part in states)), torch.zeros(()))
    assert all(torch.equal(ours, part[1:]) for ours, part in zip(after, states, strict=True))
    assert after.scale[-1].item() == top


EXTREME = [
    ScaleConfig(init=LIMITS.max, growth=LIMITS.max, interval=1, ceiling=LIMITS.max),
    ScaleConfig(init=LIMITS.tiny, backoff=LIMITS.tiny, floor=LIMITS.tiny),
    ScaleConfig(
        init=1.0, growth=LIMITS.max, backoff=LIMITS.tiny, interval=1, ceiling=LIMITS.max, floor=LIMITS.tiny
    ),
    ScaleConfig(growth=1.0, backoff=1.0, interval=1),
]


@pytest.mark.parametrize("config", EXTREME)
def test_no_history_takes_the_scale_to_zero_or_infinity(config: ScaleConfig) -> None:
    every = torch.tensor(list(itertools.product((0.0, 1.0), repeat=8))).T
    scales = scales_of(config, every)
    assert scales.isfinite().all()
    assert (scales >= LIMITS.tiny).all()


def test_a_dynamic_scale_starts_at_most_at_its_ceiling() -> None:
    assert ScaleConfig(init=2.0**20, ceiling=2.0**10).start().scale.item() == 2.0**10
    assert ScaleConfig.static(2.0**30).start().scale.item() == 2.0**30


REFUSED = [
    {"growth": 0.5},
    {"growth": math.nan},
    {"backoff": 2.0},
    {"backoff": 0.0},
    {"backoff": -0.5},
    {"interval": 0},
    {"interval": -5},
    {"interval": 2.0},
    {"interval": True},
    {"interval": 2**31},
    {"interval": None},
    {"hysteresis": 0},
    {"hysteresis": "2"},
    {"refill": "never"},
    {"refill": []},
    {"floor": 0.0},
    {"floor": math.nan},
    {"floor": None},
    {"ceiling": math.inf},
    {"ceiling": "2**24"},
    {"floor": 8.0, "ceiling": 4.0},
    {"patience": 0},
    {"patience": 1.5},
    {"dynamic": "yes"},
    {"dynamic": None},
]


@pytest.mark.parametrize("kwargs", REFUSED, ids=str)
def test_refused_configuration_names_the_argument(kwargs: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="|".join(kwargs)):
        ScaleConfig(**kwargs)  # type: ignore[arg-type]


def test_bounds_of_a_static_scale_do_not_matter() -> None:
    assert ScaleConfig(dynamic=False, floor=8.0, ceiling=4.0).start().scale.item() == 2.0**16


def test_configuration_cannot_be_edited() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ScaleConfig().init = 1.0  # type: ignore[misc]


def test_require_scale_gives_a_float() -> None:
    for value in (1, 1024, 2.0**-126, LIMITS.max):
        assert require_scale("x", value) == value
        assert isinstance(require_scale("x", value), float)
