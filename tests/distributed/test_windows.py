"""Several backward passes a step under ``DistributedDataParallel`` (gloo): the gradients of plain torch, on every rank."""

from __future__ import annotations

import pytest

from distributed.launching import Seen, launched
from distributed.window_ranks import FRONTS, SCALE
from support.nets import LEVELS
from support.states import same

ranks = launched("distributed.window_ranks")

CLOSE = {"O0": 1e-6, "O1": 1e-2, "O2": 1e-2, "O4": 3e-2, "O5": 3e-2}
LOOPS = [(front, level) for front in FRONTS for level in LEVELS if level != "O3"]


def check(ranks: Seen, name: str, expected: str, level: str) -> None:
    for mine, plain in zip(ranks[name], ranks[expected], strict=True):
        for of_window, wanted in zip(mine, plain, strict=True):
            assert len(of_window) == len(wanted)
            for one, other in zip(of_window, wanted, strict=True):
                assert (one - other).norm() <= CLOSE[level] * other.norm()


@pytest.mark.parametrize(("front", "level"), LOOPS)
def test_a_gradient_that_fills_a_bucket_is_not_written_by_the_next_pass(
    ranks: Seen, front: str, level: str
) -> None:
    check(ranks, f"buckets {front} {level}", "buckets torch O0", level)


@pytest.mark.parametrize(("front", "level"), LOOPS)
def test_bucket_views_change_no_bit(ranks: Seen, front: str, level: str) -> None:
    """In the second forward pass of a run DDP lays the gradients of low weights, rounded, into new buckets."""
    for with_views, without in zip(
        ranks[f"views True {front} {level}"], ranks[f"views False {front} {level}"], strict=True
    ):
        for one, other in zip(with_views, without, strict=True):
            assert same(one, other)


@pytest.mark.parametrize(("front", "level"), LOOPS)
def test_a_static_graph_changes_no_bit(ranks: Seen, front: str, level: str) -> None:
    """As in torch, which needs the first pass of a run to be reduced."""
    for static, plain in zip(
        ranks[f"static True {front} {level}"], ranks[f"static False {front} {level}"], strict=True
    ):
        assert all(same(one, other) for one, other in zip(static, plain, strict=True))


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


@pytest.mark.parametrize(("front", "level"), LOOPS)
def test_one_rank_alone_reaches_a_branch_between_two_reduced_passes(
    ranks: Seen, front: str, level: str
) -> None:
    check(ranks, f"branch {front} {level}", "branch torch O0", level)
    first, *others = [gradients for (gradients,) in ranks[f"branch {front} {level}"]]
    assert all(same(first, other) for other in others)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_fused_step_takes_gradients_that_ddp_has_moved_to_new_buckets(ranks: Seen, level: str) -> None:
    check(ranks, f"fused {level}", "buckets torch O0", level)


@pytest.mark.parametrize(("front", "level"), LOOPS)
def test_scales_fall_alike_after_an_unreduced_pass_of_one_rank_has_overflowed(
    ranks: Seen, front: str, level: str
) -> None:
    """No rank but that one knows which loss it was, so the scales of all losses of the window fall."""
    seen = ranks[f"overflow {front} {level}"]
    for one in seen:
        assert one["outcomes"] == [True, False, True, True]
        assert one["scales"] == [(SCALE / 2 if level in ("O1", "O2") else 1.0)] * 2
        assert same(one["values"], seen[0]["values"])


@pytest.mark.parametrize(("front", "level"), LOOPS)
def test_a_dropped_pass_moves_no_scale(ranks: Seen, front: str, level: str) -> None:
    scale = SCALE if level in ("O1", "O2") else 1.0
    for one in ranks[f"dropped {front} {level}"]:
        assert one == {"outcome": False, "scales": [scale / 2 if scale > 1 else scale, scale]}


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_nan_gradients_that_ddp_has_moved_are_recognised(ranks: Seen, level: str) -> None:
    for finite, of_nan in zip(ranks[f"moved {level} 1.0"], ranks[f"moved {level} nan"], strict=True):
        assert all(grad.isfinite().all() for grad in finite)
        assert all(grad.isnan().all() for grad in of_nan)
