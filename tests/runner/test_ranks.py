"""Two ranks (gloo): they resume from one file, reduce a window once, and share an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed.launching import Seen, launch
from halfpeak.runner.distributed import gather
from runner.resume_ranks import KINDS, WINDOWS, whole_batch
from support.states import same


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Seen:
    return launch("runner.resume_ranks", 2, folder)


@pytest.mark.parametrize("name", ["ddp", "hook"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_between_two_passes_is_bitwise_on_every_rank(ranks: Seen, kind: str, name: str) -> None:
    """But for random numbers, which no file of several ranks holds."""
    first, second = ranks[f"{kind} {name}"]
    assert first["differences"] == second["differences"] == []
    assert torch.equal(first["weight"], second["weight"])


@pytest.mark.parametrize("way", ["once", "once, without forward"])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_reduced_once(ranks: Seen, name: str, way: str) -> None:
    """Six iterations are two windows."""
    for rank in range(2):
        once, always = ranks[f"{name} {way}"][rank], ranks[f"{name} always"][rank]
        assert (once["count"], always["count"]) == (2, 6)
        assert same(once["weights"], always["weights"])
        assert same(once["weights"], ranks[f"{name} {way}"][0]["weights"])


def test_what_the_reduced_windows_come_to(ranks: Seen) -> None:
    """Against two steps by hand with the mean gradient over the ranks and over the iterations of a window."""
    weight = torch.zeros(2, 3)
    for window in (range(4), range(4, 6)):
        batches = [whole_batch(number, rank) for number in window for rank in range(2)]
        weight -= 0.5 * sum(y.T @ x for x, y in batches) / len(batches)
    assert torch.allclose(ranks["float32 once"][0]["weights"][0], weight)


def test_ranks_share_an_evaluation(ranks: Seen, folder: Path) -> None:
    """The sampler pads five samples to six for two ranks; the sixth is dropped. The statistics are rank 0's."""
    first, second = ranks["evaluation"]
    results = [[index % 2, float(index), 7.0] for index in range(5)]
    assert (first["seen"], second["seen"]) == ([results] * 2, [])
    assert first["asked"] == second["asked"] == ["somewhere"] * 2
    assert first["files"] == ["best_acc_epoch_1.pth"]
    assert first["output"]["acc"] == 0.5
    assert second["output"] == {}
    saved = torch.load(folder / "best" / "best_acc_epoch_1.pth", weights_only=True)
    assert saved["meta"]["hook_msgs"]["best_score"] == 1.0


def test_buffers_are_averaged_after_an_epoch(ranks: Seen) -> None:
    assert ranks["buffers"] == [7.5, 7.5]


def test_one_rank_alone_gathers_itself() -> None:
    assert gather({"a": (1, None)}) == [{"a": (1, None)}]
