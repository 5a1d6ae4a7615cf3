"""Gradients that a script reduces or edits by hand on two ranks (gloo): c10d's collectives raise no version counter."""

from __future__ import annotations

import pytest
import torch

from distributed.by_hand_ranks import LEVELS, OPTIMIZERS, POISONED, REDUCTIONS, STEPS
from distributed.launching import Seen, launched
from support.states import same

ranks = launched("distributed.by_hand_ranks")

OUTCOMES = [step != POISONED for step in range(STEPS)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", REDUCTIONS)
def test_ranks_whose_gradients_a_script_has_reduced_step_together(
    ranks: Seen, level: str, optimizer: str, how: str
) -> None:
    first, other = ranks[f"{level} {optimizer} {how}"]
    assert first["outcomes"] == other["outcomes"] == OUTCOMES
    assert first["scales"] == other["scales"] == [512.0 if level in ("O1", "O2") else 1.0]
    assert same(first["values"], other["values"])
    assert same(first["mains"], other["mains"])


@pytest.mark.parametrize(("level", "close"), [("O0", 0.0), ("O1", 1e-3), ("O2", 1e-3), ("O5", 1e-2)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_they_train_as_a_loop_by_hand(ranks: Seen, level: str, close: float, optimizer: str) -> None:
    for one, other in zip(ranks[f"{level} {optimizer} sum"][0]["mains"], ranks["by hand"][0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=close or 1e-7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_script_may_add_gradients_of_another_loss_on_each_rank(ranks: Seen, optimizer: str) -> None:
    first, other = ranks[f"mixed {optimizer}"]
    assert first["outcomes"] == other["outcomes"] == [True] * (STEPS - 1)
    assert same(first["mains"], other["mains"])
    for one, by_hand in zip(first["mains"], ranks["by hand"][0], strict=True):
        torch.testing.assert_close(one, by_hand, rtol=0, atol=1e-3)


def test_shards_of_ranks_that_use_other_losses_are_refused(ranks: Seen) -> None:
    for rank, seen in enumerate(ranks["losses of shards"]):
        assert f"loss_id={rank}" in seen["said"][0]
        assert seen["said"][1] == ""
        assert seen["stepped"]


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("clips", [False, True])
def test_what_one_rank_writes_to_its_shards_is_seen_by_all(ranks: Seen, level: str, clips: bool) -> None:
    for seen in ranks[f"shards {level} inf {clips}"]:
        assert seen == {"outcomes": OUTCOMES, "finite": True}
    for seen in ranks[f"shards {level} 0.0 {clips}"]:
        assert seen == {"outcomes": [True] * STEPS, "finite": True}


def test_check_ranks_compares_what_ranks_share(ranks: Seen) -> None:
    for said in ranks["compared shared"]:
        assert "rank 1 differs from rank 0 in the weights 2.weight" in said
    assert ranks["compared of one rank"] == ["", ""]
