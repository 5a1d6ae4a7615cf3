"""Fabric and Trainer on two ranks: what a loop of one's own computes; their checkpoints on two ranks and on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.launching import Seen
from integrations.shard_loop import distance, run_script, same, two_then_one
from integrations.test_page import script

pytest.importorskip("lightning")

LOOPS = ("Fabric", "Trainer")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Seen]:
    return two_then_one("integrations.lightning_ranks", tmp_path_factory.mktemp("ranks"))


def test_replicas_agree_and_compute_what_one_does(ranks: Any) -> None:
    """Also where passes are not reduced, and one rank overflows in such a pass."""
    (first, second), (alone,) = ranks(2)["replicated"], ranks(1)["replicated"]
    assert first["stepped"] == second["stepped"] == alone["stepped"] == [True, True, False, True]
    assert same(first["weights"], second["weights"])
    assert distance(first["weights"], alone["weights"]) < 1e-3


@pytest.mark.parametrize("trained", ["O2 AdamW", "O1 AdamW", "O5 FusedAdamW"])
@pytest.mark.parametrize("loop", LOOPS)
def test_losses_and_weights_are_those_of_a_loop_of_ones_own(ranks: Any, loop: str, trained: str) -> None:
    assert ranks(2)[f"{loop} {trained}"] == [[True, True]] * 2


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_checkpoint_goes_on_bitwise(ranks: Any, loop: str, kind: str) -> None:
    assert ranks(2)[f"{loop} {kind}"] == [[True, True]] * 2


@pytest.mark.parametrize("loop", LOOPS)
def test_a_checkpoint_of_two_ranks_goes_on_with_one(ranks: Any, loop: str) -> None:
    (found,), (expected, _) = ranks(1)[loop], ranks(2)[f"{loop} weights"]
    assert distance(found, expected) < 1e-3


def test_ranks_skip_together_on_any_number_of_them(ranks: Any) -> None:
    assert ranks(2)["outcomes"] == [[True, True, True, False, True, True]] * 2
    assert ranks(1)["outcomes"] == [[False, True, True]]


def test_callbacks_that_copy_the_module_are_refused(ranks: Any) -> None:
    for said in ranks(2)["averages"]:
        assert said.startswith("ParameterError: Module is sharded, and torch copies no sharded model")


@pytest.mark.parametrize("loop", ["lightning", "fabric"])
def test_the_script_of_the_page_runs(tmp_path: Path, loop: str) -> None:
    printed = run_script(script(f"ranks-{loop}"), tmp_path, "lightning")
    losses = [float(line.split()[-1]) for line in printed if line.startswith("loss")]
    assert losses[-1] < losses[0]
    assert (tmp_path / "last.ckpt").is_dir()
