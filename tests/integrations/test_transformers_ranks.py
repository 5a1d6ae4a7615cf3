"""transformers' Trainer over FSDP2 on two ranks: what a loop of one's own computes, and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.launching import Seen, check_refusals
from integrations.shard_loop import distance, run_script, two_then_one
from integrations.test_page import script

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Seen]:
    return two_then_one("integrations.transformers_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("trained", ["O2 AdamW", "O1 AdamW", "O5 FusedAdamW"])
def test_losses_and_weights_are_those_of_a_loop_of_ones_own(ranks: Any, trained: str) -> None:
    assert ranks(2)[trained] == [[True, True]] * 2


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_checkpoint_goes_on_bitwise(ranks: Any, kind: str) -> None:
    counters = {"micro_step": 6, "num_steps": 5, "num_skipped": 1}
    assert ranks(2)[kind] == [[True, True, counters]] * 2


def test_a_checkpoint_of_two_ranks_goes_on_with_one(ranks: Any) -> None:
    (found,), (expected, _) = ranks(1)["weights"], ranks(2)["weights"]
    assert distance(found, expected) < 1e-3


def test_a_saved_model_has_the_float32_weights(ranks: Any) -> None:
    assert ranks(2)["final"] == [["torch.float32", True]] * 2


def test_what_cannot_be_followed_is_refused(ranks: Any) -> None:
    check_refusals(ranks(2)["refusals"], 1)


def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    run_script(script("ranks-transformers"), tmp_path, "transformers", needs_accelerators=True)
    config = json.loads((tmp_path / "out" / "final" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["dtype"] == "float32"
    assert (tmp_path / "out" / "checkpoint-4" / "scaler.pt").is_file()
