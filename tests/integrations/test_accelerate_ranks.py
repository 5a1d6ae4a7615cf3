"""accelerate over FSDP2 on two ranks: what a loop of one's own computes, and its checkpoints on two ranks and on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launching import Seen, check_refusals
from integrations.shard_loop import distance, run_script, two_then_one
from integrations.test_page import script

pytest.importorskip("accelerate")

TRAINED = ("O2 AdamW", "O2 NAdam", "O2 FusedAdamW", "O1 AdamW", "O5 AdamW")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Seen]:
    return two_then_one("integrations.accelerate_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("trained", TRAINED)
def test_losses_and_weights_are_those_of_a_loop_of_ones_own(ranks: Any, trained: str) -> None:
    assert ranks(2)[trained] == [[True, True]] * 2
    assert ranks(2)[f"outcomes {trained}"] == [[True, True, True, False, True, True]] * 2


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiling_and_activation_checkpointing_change_no_bit(ranks: Any, level: str) -> None:
    """At O1 the model is compiled, at O2 its blocks are recomputed in the backward pass."""
    assert ranks(2)[f"changed {level}"] == [[True, True]] * 2


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_checkpoint_goes_on_bitwise(ranks: Any, kind: str) -> None:
    counters = {"micro_step": 6, "num_steps": 5, "num_skipped": 1}
    assert ranks(2)[kind] == [[True, True, counters]] * 2


def test_a_checkpoint_of_two_ranks_goes_on_with_one(ranks: Any) -> None:
    ((_, stepped),) = ranks(1)["resumed"]
    assert stepped == [False, True, True]
    (found,), (expected, _) = ranks(1)["weights"], ranks(2)["weights"]
    assert distance(found, expected) < 1e-3


def test_full_weights_are_float32(ranks: Any) -> None:
    rank0, rank1 = ranks(2)["full weights"]
    assert len(rank0) > 10
    assert set(rank0.values()) == {torch.float32}
    assert rank1 == {}


def test_a_save_inside_a_window_leaves_it_out(ranks: Any) -> None:
    for window, messages in ranks(2)["inside a window"]:
        assert window is None
        assert len(messages) == 1


def test_what_cannot_be_followed_is_refused(ranks: Any) -> None:
    check_refusals(ranks(2)["refusals"], 5)


def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    printed = run_script(script("ranks-accelerate"), tmp_path, "accelerate", needs_accelerators=True)
    losses = [float(line.split()[-1]) for line in printed if line.startswith("loss")]
    assert losses[-1] < losses[0]
    assert (tmp_path / "state" / "pytorch_model_fsdp_0").is_dir()
