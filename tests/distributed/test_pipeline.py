"""torch's pipeline schedules: all stages share one loss scale and one norm, equal to those of one process."""

from __future__ import annotations

import pytest

from distributed.launching import Seen, launched
from distributed.pipeline_ranks import BYPASSED, cases

CLOSE = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3, "O4": 1e-2, "O5": 1e-2}

ranks = launched("distributed.pipeline_ranks")


@pytest.mark.parametrize(("level", "schedule", "optimizer"), list(cases()))
def test_stages_train_as_one_process_does(ranks: Seen, level: str, schedule: str, optimizer: str) -> None:
    seen = ranks[f"{level} {schedule} {optimizer}"]
    for one in seen:
        assert one["outcomes"] == [True, True, False, True, True]
        assert one["scales"] == seen[0]["scales"]
        assert one["norms"][:2] == seen[0]["norms"][:2]
        assert one["norms"][:2] == pytest.approx(one["expected"][:2], rel=CLOSE[level])
        assert one["distance"] < CLOSE[level] < one["moved"]


@pytest.mark.parametrize(("kind", "level"), BYPASSED)
def test_a_backward_pass_that_goes_past_the_engine_is_noticed(ranks: Seen, kind: str, level: str) -> None:
    said = "no backward pass of this step went through halfpeak"
    assert all(said in one for one in ranks[f"{kind} {level}"]), ranks[f"{kind} {level}"]
