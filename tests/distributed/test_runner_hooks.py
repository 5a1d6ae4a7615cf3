"""mmcv's hooks on two ranks (gloo): they stay bitwise equal, average with and without DDP, and skip together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed.launching import Seen, launched
from distributed.runner_ranks import HOOKS, POISONED, TOTAL
from support.states import same

ranks = launched("distributed.runner_ranks")


def check_agreement(seen: list[Any]) -> Any:
    """Assert that all ranks are bitwise equal after every step; return the first."""
    first = seen[0]
    for other in seen[1:]:
        for name in ("parameters", "masters", "momenta", "trail"):
            assert same(first[name], other[name]), name
        assert first["scales"] == other["scales"]
        assert first["moved"] == other["moved"]
    return first


@pytest.mark.parametrize("poisoned", [None, POISONED])
@pytest.mark.parametrize(
    ("way", "kind"),
    # As in mmcv, OptimizerHook leaves the reduction to DDP.
    [*(("ddp", kind) for kind in HOOKS), *(("hook", kind) for kind in HOOKS if kind != "fp32")],
)
def test_ranks_agree(ranks: Seen, kind: str, way: str, poisoned: int | None) -> None:
    first = check_agreement(ranks[f"{way} {kind} {poisoned}"])
    assert first["moved"] == [number != poisoned for number in range(TOTAL)]
    if kind != "fp32":
        fallen = [after < before for before, after in zip(first["scales"], first["scales"][1:], strict=False)]
        assert [number for number, fell in enumerate(fallen, 1) if fell] == (
            [] if poisoned is None else [poisoned]
        )


@pytest.mark.parametrize("kind", ["autocast", "master"])
def test_a_hook_that_reduces_gradients_itself_steps_a_fused_optimizer(ranks: Seen, kind: str) -> None:
    fused, plain = check_agreement(ranks[f"fused {kind}"]), ranks[f"hook {kind} {POISONED}"][0]
    assert (fused["moved"], fused["scales"]) == (plain["moved"], plain["scales"])
    for one, other in zip(fused["masters"], plain["masters"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=2e-3)


def test_a_runner_steps_through_ddp(ranks: Seen) -> None:
    for one, other in zip(ranks["steps"], ranks["ddp fp32 None"], strict=True):
        assert same(one["parameters"], other["parameters"])


@pytest.mark.parametrize("kind", ["autocast", "master"])
@pytest.mark.parametrize("poisoned", [None, POISONED])
def test_the_hook_averages_as_ddp_does(ranks: Seen, kind: str, poisoned: int | None) -> None:
    """DDP sums scaled gradients, low-precision ones in ``master``; the hook sums unscaled float32: close, not equal."""
    ddp, own = ranks[f"ddp {kind} {poisoned}"][0], ranks[f"hook {kind} {poisoned}"][0]
    assert own["scales"] == ddp["scales"]
    for a, b in zip(own["masters"], ddp["masters"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3)
    if kind == "autocast":
        assert same(own["masters"], ddp["masters"])


@pytest.mark.parametrize("kind", ["autocast", "master"])
def test_with_and_without_buckets(ranks: Seen, kind: str) -> None:
    coalesced = check_agreement(ranks[f"hook {kind} {POISONED}"])
    for way in ("single", "buckets"):
        assert same(check_agreement(ranks[f"{way} {kind}"])["masters"], coalesced["masters"])


@pytest.mark.parametrize("kind", HOOKS)
def test_an_overflow_anywhere_in_a_window(ranks: Seen, kind: str) -> None:
    ways = [f"ddp every 3 {kind}", f"static graph every 3 {kind}"] + (
        [f"every 3 {kind}"] if kind != "fp32" else []
    )
    for way in ways:
        first = check_agreement(ranks[way])
        assert first["moved"] == [number in (2, 7) for number in range(TOTAL)]


def test_averages(ranks: Seen) -> None:
    for one in ranks["average"]:
        for way in ("coalesced", "buckets", "single"):
            assert same(one[way], one["expected"])


def test_how_much_is_sent_at_once(ranks: Seen) -> None:
    for one in ranks["collectives"]:
        assert one == {"one bucket": 1, "5 kB": 2, "each": 6}


def test_averages_of_halves(ranks: Seen) -> None:
    for one in ranks["average half"]:
        assert same(one["coalesced"], one["single"])
        assert same(one["buckets"], one["single"])
    for one in ranks["large"]:  # mmcv's coalesced sum was inf
        assert [one[way].tolist() for way in ("True", "False")] == [[40000.0] * 2] * 2


def test_gradients_that_only_some_ranks_have(ranks: Seen) -> None:
    for rank, one in enumerate(ranks["missing"]):
        *present, absent = one["grads"]
        assert all(torch.equal(grad, torch.full((3,), 0.5)) for grad in present)
        assert absent is None
        assert torch.equal(one["frozen"], torch.full((3,), float(rank)))


def test_a_parameter_that_one_rank_does_not_use(ranks: Seen) -> None:
    assert all(check_agreement(ranks["idle"])["moved"])


def test_buffers(ranks: Seen) -> None:
    for one in ranks["buffers"]:
        assert one["running_mean"].tolist() == [0.5] * 2
        assert one["num_batches_tracked"].item() == 7
        assert one["flag"].item() is True


def test_ranks_left_to_themselves(ranks: Seen) -> None:
    one, other = ranks["alone"]
    assert not same(one["parameters"], other["parameters"])


def test_who(ranks: Seen) -> None:
    assert ranks["who"] == [{"info": [0, 2], "only": "ran"}, {"info": [1, 2], "only": None}]
