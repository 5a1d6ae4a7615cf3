"""One rank of four differs (gloo): no rank hangs, all begin the same collectives, and all skip or refuse together."""

from __future__ import annotations

import pytest

from distributed.asymmetric_ranks import EXPERTS, ODD, STEPS, scenarios
from distributed.launching import Seen, launched
from support.states import same

NAMES = list(scenarios())
DIFFERENT = ("scale", "checkpoint", "failed")


ranks = launched("distributed.asymmetric_ranks", ranks=4)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(DIFFERENT)])
def test_ranks_step_and_skip_together(ranks: Seen, name: str) -> None:
    seen, (layout, _, kind) = ranks[name], name.partition(" ")
    expected = [step != 2 or not kind.startswith("nan") for step in range(STEPS)]
    for one in seen:
        assert one["outcomes"] == expected
        assert (one["scale"], one["counters"]) == (seen[0]["scale"], seen[0]["counters"])
        assert one["collectives"] == seen[0]["collectives"]
        if layout == "ddp":
            assert same(one["values"], seen[0]["values"])


@pytest.mark.parametrize(("level", "name"), EXPERTS)
def test_experts_and_what_ranks_share_are_clipped_by_one_norm(ranks: Seen, level: str, name: str) -> None:
    seen, close = ranks[f"experts {level} {name}"], {"O0": 1e-6, "O2": 1e-3, "O5": 1e-2}[level]
    for one in seen:
        assert one["outcomes"] == [True, True, False, True, True]
        assert one["norms"] == pytest.approx(one["expected"], rel=close, nan_ok=True)
        assert one["norms"][:2] == seen[0]["norms"][:2]
        assert same(one["shared"], seen[0]["shared"])
        assert one["distance"] < close


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("own norms", "clipped by different gradient norms"),
        ("wrapped before", "wrapped the model before its parameters became torch.float16"),
    ],
)
def test_what_would_part_ranks_is_refused_on_all(ranks: Seen, name: str, text: str) -> None:
    assert all(text in one for one in ranks[name])


RIDES = f"rank {ODD} dropped 1 backward passes or windows, and another rank fewer"


@pytest.mark.parametrize(
    ("name", "at", "text"),
    [
        ("none", 2, RIDES),
        ("ddp", 1, f"rank {ODD} differs from rank 0 in"),
        ("fsdp", 1, f"rank {ODD} differs from rank 0 in"),
        ("ddp backward", 1, f"rank {ODD} differs from rank 0 in passes or windows dropped 1 (not 0)"),
        ("ddp backward, group", 1, RIDES),
    ],
)
def test_a_rank_that_failed_alone_is_noticed(ranks: Seen, name: str, at: int, text: str) -> None:
    """``check_ranks`` finds it after the same step; the reduction of ``found_inf`` finds it in the next step."""
    for rank, one in enumerate(ranks[f"{name} failed"]):
        # The failed rank is one iteration ahead: its third meets the collectives of the others' second.
        assert one["at"] == at + ("backward" in name and rank == ODD)
        assert text in one["error"]


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(DIFFERENT[:2])])
def test_ranks_that_differ_are_told_on_all(ranks: Seen, name: str) -> None:
    for one in ranks[name]:
        assert "the scale of loss 0" in one["error"]
        assert one["collectives"] == ranks[name][0]["collectives"]


def test_who_is_left_alone_gets_an_error(ranks: Seen) -> None:
    assert ranks["leave"] == [
        "RuntimeError, open: False" if i != 1 else "gone" for i in range(len(ranks["leave"]))
    ]
