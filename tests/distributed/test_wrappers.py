"""``OptimWrapper`` on two ranks (gloo): ranks stay bitwise equal, reduce once per window, and skip together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed.launching import Seen, check_refusals, launched
from distributed.wrapper_ranks import KINDS, TOTAL
from support.states import same

two = launched("distributed.wrapper_ranks")


def check_parallel(seen: list[Any], every: int, poisoned: int | None, more: int = 0) -> None:
    first = seen[0]
    for other in seen[1:]:
        assert same(first["parameters"], other["parameters"])
        assert same(first["masters"], other["masters"])
        assert (first["skipped"], first["extra"]) == (other["skipped"], other["extra"])
    assert all(p.isfinite().all() for p in first["parameters"])
    steps = -(-TOTAL // every)
    assert [one["reductions"] for one in seen] == [steps + more] * len(seen)
    assert first["skipped"] == [
        float(poisoned is not None and step == poisoned // every) for step in range(steps)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("every", "poisoned"), [(1, 4), (3, 4), (3, None)])
def test_ranks_stay_equal(two: Seen, kind: str, every: int, poisoned: int | None) -> None:
    check_parallel(two[f"parallel {kind} {every} {poisoned}"], every, poisoned)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_pass_of_a_static_graph_is_reduced_whether_a_step_is_due_or_not(
    two: Seen, kind: str
) -> None:
    check_parallel(two[f"static graph {kind}"], 3, 4, more=1)


def test_plain_is_the_loop_that_anyone_would_write(two: Seen) -> None:
    for mine, by_hand in zip(two["parallel plain 3 None"], two["by hand"], strict=True):
        assert same(mine["parameters"], by_hand["parameters"])


@pytest.mark.parametrize("kind", ["plain", "amp", "O1", "O2", "O5"])
def test_resume_inside_a_window_is_bitwise(two: Seen, kind: str) -> None:
    for one in two[f"resumed {kind}"]:
        assert same(one["straight"], one["resumed"])


@pytest.mark.parametrize("kind", ["plain", "amp", "O4"])
@pytest.mark.parametrize("poisoned", [None, 5])
def test_shards_skip_together_and_are_clipped_by_one_norm(two: Seen, kind: str, poisoned: int | None) -> None:
    first, other = two[f"sharded {kind} {poisoned}"]
    assert same(first["parameters"], other["parameters"])
    assert first["norms"] == other["norms"]
    assert first["skipped"] == other["skipped"] == [0.0, float(poisoned is not None), 0.0]
    whole = two[f"parallel {kind} 3 None"][0]["parameters"]
    assert [p.shape for p in whole] == [p.shape for p in first["parameters"]]


def test_every_network_in_a_model_is_connected_again(two: Seen) -> None:
    first, other = two["nested"]
    assert same(first["parameters"], other["parameters"])
    assert first["parameters"][0].dtype is torch.float16


def test_a_loop_of_others_keeps_weights_whole_and_saves_one_state_for_all_ranks(two: Seen) -> None:
    first, other = two["in a loop"]
    assert same(first["kept"], first["read"])
    assert same(other["kept"], first["read"])
    assert first["state"] == other["state"]
    assert all("save after a step" in warning for seen in (first, other) for warning in seen["warned"])
    assert len(first["warned"]) == 1


def test_what_cannot_work_is_refused_on_every_rank(two: Seen) -> None:
    check_refusals(two["refusals"], 5)
