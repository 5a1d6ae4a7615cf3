"""torch's Muon beside AdamW over FSDP2 on four ranks (gloo): to the bit the loop by hand; what Muon cannot step is refused."""

from __future__ import annotations

import pytest

from distributed.launching import Seen, check_refusals, launched
from distributed.muon_ranks import LEVELS, OVERFLOWS, STEPS
from support.states import same

ranks = launched("distributed.muon_ranks", ranks=4)


@pytest.mark.parametrize("level", LEVELS)
def test_it_trains_shards_as_a_loop_by_hand_and_resumes(ranks: Seen, level: str) -> None:
    for seen in ranks[level]:
        assert seen["stepped"] == [step != OVERFLOWS for step in range(STEPS)]
        assert same(seen["by an engine"], seen["by hand"])
        assert same(seen["resumed"], seen["by hand"])
        assert same(seen["by hand"], ranks[level][0]["by hand"])


def test_what_muon_cannot_step_is_refused_and_nothing_else(ranks: Seen) -> None:
    for seen in ranks["steppable"]:
        assert {takes for _, takes, _ in seen} == {True, False}
        assert not [what for what, takes, steps in seen if takes != steps]


def test_the_refusal_says_what_to_write_and_changes_nothing(ranks: Seen) -> None:
    check_refusals(ranks["refusals"], 1)
