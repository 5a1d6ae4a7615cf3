"""Fabric and Trainer over FSDP2 on two ranks: what a loop of one's own computes; their checkpoints on two ranks and on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.launching import Seen, launch, run_as_torchrun
from integrations.test_page import script

pytest.importorskip("lightning")

LOOPS = ("Fabric", "Trainer")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Seen]:
    """What one or two ranks have seen; two ranks save what one then loads."""
    folder = tmp_path_factory.mktemp("ranks")
    seen: dict[int, Seen] = {}
    for count in (2, 1):
        (folder / str(count)).mkdir()
        seen[count] = launch("integrations.lightning_shard_ranks", count, folder / str(count))
    return seen.__getitem__


@pytest.mark.parametrize("trained", ["O2 AdamW", "O2 NAdam", "O1 AdamW", "O5 FusedAdamW"])
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
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-3


def test_ranks_skip_together_on_any_number_of_them(ranks: Any) -> None:
    assert ranks(2)["outcomes"] == [[True, True, True, False, True, True]] * 2
    assert ranks(1)["outcomes"] == [[False, True, True]]


def test_callbacks_that_copy_the_module_are_refused(ranks: Any) -> None:
    for said in ranks(2)["averages"]:
        assert said.startswith("ParameterError: Module is sharded, and torch copies no sharded model")


@pytest.mark.parametrize("loop", ["lightning", "fabric"])
def test_the_script_of_the_page_runs(tmp_path: Path, loop: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"import os; os.chdir({str(tmp_path)!r})\n" + script(f"ranks-{loop}"))
    (printed,) = run_as_torchrun([str(file)])
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("loss")]
    assert losses[-1] < losses[0]
    assert (tmp_path / "last.ckpt").is_dir()
