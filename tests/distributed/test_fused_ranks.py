"""A fused optimizer on two ranks (gloo): equal after every step, also with an inf on one rank, for each option of DDP;
and bitwise equal to a run whose gradients are unscaled before the step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from distributed.fused_ranks import MODES, NAMES, POISONED, STEPS
from distributed.launching import Seen, launched
from support.states import same

ranks = launched("distributed.fused_ranks")


def assert_same(one: list[Any], other: list[Any]) -> None:
    for mine, others in zip(one, other, strict=True):
        assert mine[:2] == others[:2]
        assert same([*mine[2], *mine[3]], [*others[2], *others[3]])


@pytest.mark.parametrize("name", NAMES)
def test_ranks_are_equal_after_every_step(ranks: Seen, name: str) -> None:
    first, second = (seen["history"] for seen in ranks[name])
    assert_same(first, second)
    assert [stepped for stepped, *_ in first] == [step != POISONED for step in range(STEPS)]


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(" waits") and "never" not in name])
def test_waiting_changes_no_bit(ranks: Seen, name: str) -> None:
    assert_same(ranks[name][0]["history"], ranks[name.replace("waits", "never waits")][0]["history"])


@pytest.mark.parametrize("mode", MODES)
def test_a_hook_that_reduces_gradients_itself_keeps_the_ranks_equal(ranks: Seen, mode: str) -> None:
    first, second = ranks[f"hook {mode}"]
    for mine, others in zip(first, second, strict=True):
        assert same(mine, others)
    moved = [not torch.equal(a[0], b[0]) for a, b in pairwise(first)]
    assert moved == [step != POISONED for step in range(1, STEPS)]
