"""Several backward passes a step under ``DistributedDataParallel`` (gloo), by amp; losses that differ between ranks.

The programs of ``fuzz.programs`` hold the windows of an engine bit for bit. amp looks at each pass, also at a scale of 1.
"""

from __future__ import annotations

import pytest

from distributed.launching import Seen, launched
from distributed.window_ranks import FRONTS, SCALE
from support.nets import LEVELS
from support.states import same

ranks = launched("distributed.window_ranks")

CLOSE = {"O0": 1e-6, "O1": 1e-2, "O2": 1e-2, "O4": 3e-2, "O5": 3e-2}
TRAINED = [level for level in LEVELS if level != "O3"]


@pytest.mark.parametrize("level", TRAINED)
@pytest.mark.parametrize("kind", ["buckets", "branch"])
def test_gradients_are_those_of_plain_torch(ranks: Seen, kind: str, level: str) -> None:
    """Where a gradient fills a bucket, and where one rank alone reaches a branch."""
    for mine, plain in zip(ranks[f"{kind} amp {level}"], ranks[f"{kind} torch O0"], strict=True):
        for of_window, wanted, first in zip(mine, plain, ranks[f"{kind} amp {level}"][0], strict=True):
            assert same(of_window, first)
            for one, other in zip(of_window, wanted, strict=True):
                assert (one - other).norm() <= CLOSE[level] * other.norm()


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("how", ["now", "before"])
def test_ranks_that_use_other_losses_in_a_pass_are_refused(
    ranks: Seen, front: str, level: str, how: str
) -> None:
    """Each would divide the sum of both by its own scale. Nothing is left of the pass, and the run may go on."""
    for rank, seen in enumerate(ranks[f"losses {how} {front} {level}"]):
        assert f"loss_id={rank if how == 'now' else 0}" in seen["said"]
        assert seen["left"] == []
        assert seen["stepped"]
        assert seen["scales"] == [SCALE, SCALE]
        assert same(seen["values"], ranks[f"losses {how} {front} {level}"][0]["values"])


@pytest.mark.parametrize("level", TRAINED)
def test_scales_fall_alike_after_an_unreduced_pass_of_one_rank_has_overflowed(
    ranks: Seen, level: str
) -> None:
    """No rank but that one knows which loss it was, so the scales of all losses of the window fall."""
    seen = ranks[f"overflow amp {level}"]
    for one in seen:
        assert one["outcomes"] == [True, False, True, True]
        assert one["scales"] == [(SCALE / 2 if level in ("O1", "O2") else 1.0)] * 2
        assert same(one["values"], seen[0]["values"])
