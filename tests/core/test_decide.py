"""The one decider, in numbers and in tensors, and what it decides."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.test_schedule_on_host import CONFIGS
from halfpeak.core.decide import Decision, LossFacts, _decide_tensors, decide
from halfpeak.core.schedule import NONFINITE_LOSS, ScaleConfig, ScaleState, advance
from support.states import same

CONFIG = ScaleConfig(init=2.0**10, interval=2)


def integer(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


COUNTERS = (integer(5), integer(3))


def loss(found: float = 0.0, first: float | None = None, **changes: Any) -> LossFacts:
    state = CONFIG.start()
    given = state.scale if first is None else torch.tensor(first)
    return LossFacts(CONFIG, state, given, torch.tensor(found), **changes)


def after(found: float) -> ScaleState:
    return advance(CONFIG, CONFIG.start(), torch.tensor(found))


FACTS = st.builds(
    lambda config, moves, found, first, owned, counts: LossFacts(
        config,
        advance(config, config.start(), torch.tensor(moves)),
        torch.tensor(first),
        torch.tensor(found),
        owned,
        counts,
    ),
    CONFIGS,
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 0.0, 1.0, NONFINITE_LOSS, -1.0]),
    st.sampled_from([1.0, 2.0**10, math.inf]),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(
    found=st.sampled_from([0.0, 0.0, 1.0]),
    norm=st.sampled_from([None, 0.0, 3.3, 1e-9, math.inf, math.nan]),
    max_norm=st.sampled_from([None, 0.1, 1.0, math.inf]),
    losses=st.lists(FACTS, max_size=3),
)
def test_numbers_and_tensors_decide_alike(
    found: float, norm: float | None, max_norm: float | None, losses: list[LossFacts]
) -> None:
    known = None if norm is None else torch.tensor(norm)
    one = decide(torch.tensor(found), losses, norm=known, max_norm=max_norm, counters=COUNTERS)
    other = _decide_tensors(torch.tensor(found), losses, known, max_norm, COUNTERS)
    assert isinstance(one.skip, bool)
    assert one.skip == bool(other.skip)
    assert [int(one.num_steps), int(one.num_skipped)] == [int(other.num_steps), int(other.num_skipped)]
    for ours, theirs in zip(one.states, other.states, strict=True):
        assert same(ours, theirs)
    if not one.skip:
        assert float(one.coef) == float(other.coef)


@pytest.mark.parametrize(
    ("found", "noted", "norm", "skips"),
    [
        (0.0, 0.0, None, False),
        (1.0, 0.0, None, True),
        (0.0, 1.0, 2.0, True),
        (0.0, 0.0, math.nan, True),
        (0.0, 0.0, 2.0, False),
    ],
)
def test_what_skips_a_step(found: float, noted: float, norm: float | None, skips: bool) -> None:
    known = None if norm is None else torch.tensor(norm)
    decision = decide(torch.tensor(found), [loss(noted)], norm=known, counters=COUNTERS)
    assert decision.skip is skips
    assert [int(decision.num_steps), int(decision.num_skipped)] == ([5, 4] if skips else [6, 3])
    assert same(decision.states[0], after(float(skips)))


def states(found: float, *losses: LossFacts) -> list[ScaleState]:
    decision: Decision = decide(torch.tensor(found), losses)
    return decision.states


def test_a_skip_lowers_the_scale_of_the_loss_that_overflowed() -> None:
    blamed, clean = states(1.0, loss(1.0), loss(0.0))
    assert same(blamed, after(1.0))
    assert same(clean, after(0.0))


def test_a_skip_that_no_pass_explains_lowers_all_own_scales() -> None:
    own, foreign = states(1.0, loss(), loss(owned=False, counts=False))
    assert same(own, after(1.0))
    assert same(foreign, CONFIG.start())


def test_an_overflow_that_another_step_has_answered_lowers_nothing_again() -> None:
    assert same(states(1.0, loss(1.0, first=2.0**11))[0], CONFIG.start())


def test_a_clean_window_counts_once() -> None:
    assert same(states(0.0, loss(counts=False))[0], CONFIG.start())


def test_a_loss_that_no_rank_has_used_keeps_its_scale() -> None:
    for found in (0.0, 1.0):
        assert same(states(found, loss(-1.0), loss(found))[0], CONFIG.start())


def test_an_overflow_counts_although_the_loss_of_another_pass_was_not_finite() -> None:
    recovers = ScaleConfig(init=2.0**10, recovers=True)
    start = recovers.start()
    for noted, falls in ((NONFINITE_LOSS, False), (1.0, True)):
        facts = LossFacts(recovers, start, start.scale, torch.tensor(noted))
        assert (float(states(1.0, facts)[0].scale) < float(start.scale)) == falls


def test_what_is_not_in_host_memory_stays_there() -> None:
    found = torch.zeros((), device="meta")
    state = ScaleState(*(one.to("meta") for one in CONFIG.start()))
    counters = integer(0).to("meta"), integer(0).to("meta")
    decision = decide(
        found, [LossFacts(CONFIG, state, state.scale, found)], norm=found, max_norm=1.0, counters=counters
    )
    assert isinstance(decision.skip, Tensor)
    assert {one.device.type for one in (decision.skip, decision.coef, *decision.states[0])} == {"meta"}
