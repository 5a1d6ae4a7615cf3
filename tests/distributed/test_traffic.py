"""Collectives of a step and their bytes on two ranks (gloo): as the page says, and no more than in torch's loops."""

from __future__ import annotations

from itertools import product

import pytest

from distributed.launching import Seen, launched
from distributed.traffic_ranks import LAYOUTS, TORCH, TYPICAL, Case, name_of, table
from laws.source import ROOT

ranks = launched("distributed.traffic_ranks")


def test_the_page_has_what_was_counted(ranks: Seen) -> None:
    page = (ROOT / "docs" / "several-gpus.md").read_text()
    for rank in range(2):
        assert table({name: seen[rank] for name, seen in ranks.items()}) in page


@pytest.mark.parametrize(("layout", "level"), list(product(LAYOUTS, TYPICAL)))
def test_a_step_sends_no_more_than_that_of_torch(ranks: Seen, layout: str, level: str) -> None:
    for passes in (1, 4):
        alone = TORCH[0 if level in ("O0", "O1") else 1]
        (mine, _), (other, _) = (ranks[name_of(Case(layout, loop, passes))] for loop in (level, alone))
        # Norm layers stay float32 and are gathered in it; they are 0.8 % of the parameters here.
        assert sum(mine["bytes"].values()) <= 1.01 * sum(other["bytes"].values())
        assert mine["calls"].get("small", 0) <= other["calls"].get("small", 0) + (alone == TORCH[0])


@pytest.mark.parametrize(("layout", "level"), list(product(LAYOUTS, TYPICAL)))
def test_options_cost_one_small_all_reduce(ranks: Seen, layout: str, level: str) -> None:
    def calls(case: Case) -> dict[str, int]:
        first, other = ranks[name_of(case)]
        assert first == other
        return {"small": 0, **first["calls"]}

    plain, unclipped = calls(Case(layout, level)), calls(Case(layout, level, clip=None))
    # With DDP every rank has the whole gradients, so their norm needs no collective. With FSDP2 the norm tells whether a
    # gradient is not finite, which costs an all-reduce without it: one rank alone may have written to its shards.
    assert unclipped == plain
    assert calls(Case(layout, level, check_ranks=1)) == {**plain, "small": plain["small"] + 1}
    of_group = calls(Case(layout, level, clip=None, group="world"))
    assert of_group == {**unclipped, "small": unclipped["small"] + 1}
