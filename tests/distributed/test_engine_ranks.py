"""The engine on two ranks (gloo): bitwise equal through accumulation, with and without an inf on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from distributed.engine_ranks import LOADERS, OPTIONS, TYPICAL, ZERO_REDUNDANCY
from distributed.launching import Seen, launched
from support.states import same

ranks = launched("distributed.engine_ranks")


def state(seen: dict[str, Any]) -> list[Tensor]:
    return [*seen["parameters"], *seen["masters"], *seen["momentum"]]


@pytest.mark.parametrize("level", TYPICAL)
@pytest.mark.parametrize("poisoned", [False, True])
def test_ranks_stay_equal_and_skip_together(ranks: Seen, level: str, poisoned: bool) -> None:
    first, other = ranks[f"parallel {level} {poisoned}"]
    assert same(state(first), state(other))
    assert (first["scale"], first["counters"]) == (other["scale"], other["counters"])
    assert first["outcomes"] == other["outcomes"] == [True, not poisoned, True]
    assert all(parameter.isfinite().all() for parameter in first["parameters"])
    assert first["scale"] == (1.0 if level not in ("O1", "O2") else 512.0 if poisoned else 1024.0)


@pytest.mark.parametrize(("option", "level"), OPTIONS)
def test_options_of_ddp(ranks: Seen, option: str, level: str) -> None:
    first, other = ranks[f"option {option} {level}"]
    assert same(state(first), state(other))
    assert first["outcomes"] == other["outcomes"] == [True, option == "PowerSGD", True]
    if option == "PowerSGD":
        return  # PowerSGD does not sum gradients exactly
    (plain, _) = ranks[f"parallel {level} True"]
    # The hook rounds gradients.
    rounding = {"O0": 1e-3, "O1": 1e-3, "O2": 2e-3, "O5": 2e-2}[level]
    tolerance = rounding if option == "fp16_compress_hook" else 0.0
    for mine, theirs in zip(first["parameters"], plain["parameters"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("level", TYPICAL)
def test_after_join_weights_are_equal_and_the_rest_is_not(ranks: Seen, level: str) -> None:
    first, other = ranks[f"joined {level}"]
    assert same(first["parameters"], other["parameters"])
    assert len(first["outcomes"]) == len(other["outcomes"]) + 2
    for seen in (first, other):
        assert "rank 1 differs from rank 0 in engine.micro_step 3 (not 5)" in seen["said"]


@pytest.mark.parametrize(("group", "skipped"), [(None, [1]), ("part", [1]), ("world", [1, 3])], ids=str)
def test_ranks_agree_on_a_loss_that_is_not_finite_on_one(
    ranks: Seen, group: str | None, skipped: list[int]
) -> None:
    """The gradients that DDP has summed are an overflow to the other ranks; a loss with finite gradients is none to any."""
    first, other = ranks[f"bad losses {group}"]
    assert same(state(first), state(other))
    assert first["outcomes"] == other["outcomes"] == [step not in skipped for step in range(5)]
    assert first["scales"] == other["scales"] == [1024.0] + [512.0] * 4


@pytest.mark.parametrize("level", TYPICAL)
@pytest.mark.parametrize("how", ["loop", "amp"])
def test_gradients_of_a_network_wait_for_a_pass_that_reduces_them(ranks: Seen, level: str, how: str) -> None:
    """The critic's last pass of a window reduces nothing of the generator, which one engine trains, too."""
    first, other = ranks[f"adversarial {level} {how}"]
    assert same(first["parameters"], other["parameters"])
    tolerance = {"O0": 1e-6, "O1": 1e-3, "O2": 1e-3, "O5": 1e-2}[level]
    for mine, theirs in zip(
        first["parameters"], ranks[f"adversarial {level} one process"][0]["parameters"], strict=True
    ):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("level", ZERO_REDUNDANCY)
@pytest.mark.parametrize("how", ["engine", "loop"])
def test_a_zero_redundancy_optimizer_goes_on_from_the_state_of_all_ranks(
    ranks: Seen, level: str, how: str
) -> None:
    first, other = ranks[f"zero redundancy {level} None"]
    assert same(first, other)
    for resumed in ranks[f"zero redundancy {level} {how}"]:
        assert same(resumed, first)


@pytest.mark.parametrize("how", ["order", "one", "none"])
def test_ranks_that_use_other_losses_keep_the_same_scales(ranks: Seen, how: str) -> None:
    for seen in ranks[f"own losses {how}"]:
        assert seen["outcomes"] == [False, True, True, True]
        # Each loss counts in every step: the first fell once and grew again, the second grew.
        assert seen["scales"] == [1024.0, 2048.0]
        assert seen["counters"] == [3, 1]


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("how", LOADERS)
def test_masters_that_rank_0_alone_has_loaded_reach_all(ranks: Seen, level: str, how: str) -> None:
    first, other = ranks[f"loaded by first {level} {how}"]
    assert len(first["by first"]) > 0
    assert same(first["by first"], other["by first"])
    assert same(first["by first"], first["by all"])


def test_a_file_that_timm_saves_inside_a_window_is_loaded_by_every_rank(ranks: Seen) -> None:
    for seen in ranks["saved by timm"]:
        assert not seen["open"]
        assert "the gradients of each rank are left out" in seen["said"][0]
