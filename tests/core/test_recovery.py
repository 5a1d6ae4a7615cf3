"""``recovers=True``: the loss scale rises again after a fault, and too large a share of skips is a collapse."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from halfpeak.core.schedule import NONFINITE_LOSS, ScaleConfig, ScaleState, advance

CONFIG = ScaleConfig(recovers=True)


def play(found_infs: Iterator[float] | list[float], config: ScaleConfig = CONFIG) -> ScaleState:
    state = config.start()
    for found_inf in found_infs:
        state = advance(config, state, torch.tensor(found_inf))
    return state


def faults(pattern: str, updates: int = 1200) -> list[float]:
    rng = random.Random(pattern)
    gap = itertools.cycle([1, 7, 8, 9, 10, 11, 40]) if pattern == "crooked" else itertools.repeat(0)
    flags: list[float] = []
    while len(flags) < updates:
        if pattern == "random":
            flags.append(float(rng.random() < 1 / 40))
        elif pattern == "burst":
            flags.append(float(updates - len(flags) <= 100))
        elif pattern == "crooked":
            flags += [0.0] * next(gap) + [1.0]
        else:
            flags += [0.0] * (int(pattern) - 1) + [1.0]
    return flags


@pytest.mark.parametrize("pattern", ["40", "20", "13", "10", "7", "3", "random", "crooked", "burst"])
def test_two_hundred_clean_updates_after_a_fault_the_scale_is_healthy(pattern: str) -> None:
    assert play(faults(pattern)).scale <= CONFIG.init / 16, "the fault must have thrown it down"
    assert play(faults(pattern) + [0.0] * 200).scale.item() >= CONFIG.init / 16


def test_a_loss_that_is_not_finite_leaves_the_scale() -> None:
    moved = play([0.0, 0.0, NONFINITE_LOSS])
    assert (moved.scale.item(), moved.clean.item(), moved.stuck.item()) == (CONFIG.init, 2, 1)
    told = ScaleConfig(recovers=False)
    assert advance(told, told.start(), torch.tensor(NONFINITE_LOSS)).scale.item() == told.init / 2


@pytest.mark.parametrize("need", [2.0**9, 2.0**0, 2.0**-9])
def test_a_network_that_needs_a_small_scale_seldom_skips(need: float) -> None:
    state, skips = CONFIG.start(), 0
    for update in range(4000):
        overflow = state.scale.item() > need
        skips += overflow and update > 200
        state = advance(CONFIG, state, torch.tensor(float(overflow)))
    assert state.scale.item() >= need / 2
    assert skips / 3800 < 0.012


@pytest.mark.parametrize("kind", [1.0, NONFINITE_LOSS])
@pytest.mark.parametrize(("skips", "clean", "collapses"), [(1, 1, True), (3, 2, True), (1, 3, False)])
def test_a_collapse_by_the_share_of_skips(kind: float, skips: int, clean: int, collapses: bool) -> None:
    flags = itertools.islice(itertools.cycle([kind] * skips + [0.0] * clean), 3000)
    stuck = play(flags, ScaleConfig(recovers=True, floor=1.0)).stuck.item()
    assert (stuck >= 100) is collapses


def test_far_below_means_below_the_first_scale() -> None:
    low = ScaleConfig(recovers=True, ceiling=64.0)
    assert low.recovery is not None
    assert low.recovery.below == 4.0
    assert ScaleConfig.static().recovery is None
    assert play([1.0] * 4 + [0.0] * 200, low).scale.item() == 4.0
