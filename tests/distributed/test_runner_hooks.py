"""mmcv's hooks on several ranks (gloo): they stay bitwise equal, average with and without DDP, and skip together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed.launching import Seen, launched
from distributed.runner_ranks import HOOKS, POISONED, TOTAL
from support.states import same

two = launched("distributed.runner_ranks")
four = launched("distributed.runner_ranks", 4)


@pytest.fixture(params=["two", "four"])
def seen(request: pytest.FixtureRequest) -> Seen:
    return request.getfixturevalue(request.param)


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
def test_ranks_agree(seen: Seen, kind: str, way: str, poisoned: int | None) -> None:
    first = check_agreement(seen[f"{way} {kind} {poisoned}"])
    assert first["moved"] == [number != poisoned for number in range(TOTAL)]
    if kind != "fp32":
        fallen = [after < before for before, after in zip(first["scales"], first["scales"][1:], strict=False)]
        assert [number for number, fell in enumerate(fallen, 1) if fell] == (
            [] if poisoned is None else [poisoned]
        )


def test_a_runner_steps_through_ddp(two: Seen) -> None:
    for one, other in zip(two["steps"], two["ddp fp32 None"], strict=True):
        assert same(one["parameters"], other["parameters"])


@pytest.mark.parametrize("kind", ["autocast", "master"])
@pytest.mark.parametrize("poisoned", [None, POISONED])
def test_the_hook_averages_as_ddp_does(seen: Seen, kind: str, poisoned: int | None) -> None:
    """DDP sums scaled gradients, low-precision ones in ``master``; the hook sums unscaled float32: close, not equal."""
    ddp, own = seen[f"ddp {kind} {poisoned}"][0], seen[f"hook {kind} {poisoned}"][0]
    assert own["scales"] == ddp["scales"]
    for a, b in zip(own["masters"], ddp["masters"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3)
    if kind == "autocast" and len(seen["who"]) == 2:  # the order of two addends does not matter
        assert same(own["masters"], ddp["masters"])


@pytest.mark.parametrize("kind", ["autocast", "master"])
def test_with_and_without_buckets(two: Seen, kind: str) -> None:
    coalesced = check_agreement(two[f"hook {kind} {POISONED}"])
    for way in ("single", "buckets"):
        assert same(check_agreement(two[f"{way} {kind}"])["masters"], coalesced["masters"])


@pytest.mark.parametrize("kind", HOOKS)
def test_an_overflow_anywhere_in_a_window(two: Seen, kind: str) -> None:
    ways = [f"ddp every 3 {kind}", f"static graph every 3 {kind}"] + (
        [f"every 3 {kind}"] if kind != "fp32" else []
    )
    for way in ways:
        first = check_agreement(two[way])
        assert first["moved"] == [number in (2, 7) for number in range(TOTAL)]


@pytest.mark.parametrize("exact", [True, False])
def test_averages(seen: Seen, exact: bool) -> None:
    for one in seen[f"average {exact}"]:
        for way in ("coalesced", "buckets", "single"):
            for found, expected in zip(one[way], one["expected"], strict=True):
                if exact or len(seen["who"]) == 2:
                    assert torch.equal(found, expected)
                torch.testing.assert_close(found, expected)


def test_how_much_is_sent_at_once(two: Seen) -> None:
    for one in two["collectives"]:
        assert one == {"one bucket": 1, "5 kB": 2, "each": 6}


def test_averages_of_halves(two: Seen) -> None:
    for one in two["average half"]:
        assert same(one["coalesced"], one["single"])
        assert same(one["buckets"], one["single"])
    for one in two["large"]:  # mmcv's coalesced sum was inf
        assert [one[way].tolist() for way in ("True", "False")] == [[40000.0] * 2] * 2


def test_gradients_that_only_some_ranks_have(seen: Seen) -> None:
    world = len(seen["missing"])
    for rank, one in enumerate(seen["missing"]):
        *present, absent = one["grads"]
        assert all(torch.equal(grad, torch.full((3,), 1 / world)) for grad in present)
        assert absent is None
        assert torch.equal(one["frozen"], torch.full((3,), float(rank)))


def test_a_parameter_that_one_rank_does_not_use(two: Seen) -> None:
    assert all(check_agreement(two["idle"])["moved"])


def test_buffers(seen: Seen) -> None:
    world = len(seen["buffers"])
    for one in seen["buffers"]:
        assert one["running_mean"].tolist() == [(world - 1) / 2] * 2
        assert one["num_batches_tracked"].item() == 7
        assert one["flag"].item() is True


def test_ranks_left_to_themselves(two: Seen) -> None:
    one, other = two["alone"]
    assert not same(one["parameters"], other["parameters"])


def test_who(seen: Seen) -> None:
    world = len(seen["who"])
    assert [one["info"] for one in seen["who"]] == [[rank, world] for rank in range(world)]
    assert [one["only"] for one in seen["who"]] == ["ran"] + [None] * (world - 1)
