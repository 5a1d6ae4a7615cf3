"""Two ranks (gloo) resume from one file, each with its own random numbers, data and open window."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launching import Seen, launch
from halfpeak.runner.distributed import gather
from runner.resume_ranks import KINDS, OPEN, STOPS, WINDOWS, build_window, run, whole_batch
from support.states import same


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Seen:
    return launch("runner.resume_ranks", 2, folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", STOPS)
def test_a_resume_is_bitwise_on_every_rank(ranks: Seen, kind: str, stop: int) -> None:
    assert ranks[f"{kind} {stop}"] == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_draw_differently_and_stay_equal(ranks: Seen, kind: str) -> None:
    """Otherwise the test above could pass with the random numbers of one rank for all."""
    first, second = ranks[kind]
    assert not torch.equal(first["random"], second["random"])
    assert torch.equal(first["weight"], second["weight"])


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("stop", OPEN)
def test_a_resume_inside_a_window_is_bitwise_on_every_rank(ranks: Seen, name: str, stop: int) -> None:
    assert ranks[f"{name} {stop}"] == [[], []]
    first, second = ranks[f"{name} weight"]
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", [name for name in WINDOWS if name != "ddp master"])
def test_the_windows_of_the_ranks_differ(ranks: Seen, folder: Path, name: str) -> None:
    """Otherwise the test above could pass with the gradients of one rank for all."""
    saved = torch.load(folder / name / "iter_3.pth", weights_only=True)["ranks"]
    first, second = (gradients(rank["windows"]) for rank in saved)
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[index], second[index]) for index in first)


def gradients(windows: Any) -> dict[int, torch.Tensor]:
    (exact,) = (*(hook["halfpeak"] for hook in windows["hooks"].values()), *windows["optimizer"].values())
    (lane,) = exact["window"]["lanes"]
    return lane["true_sized"] | lane["scaled"]


def test_a_window_of_rank_0_alone_is_refused(ranks: Seen) -> None:
    for seen in ranks["alone"]:
        assert "saved by rank 0 alone and inside an accumulation window" in seen["says"]
        assert seen["changed"] == []


@pytest.mark.parametrize("name", ["hook master", "ddp wrapper"])
def test_another_number_of_ranks_leaves_the_window_out(
    ranks: Seen, folder: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = build_window(name, tmp_path)
    made.logger = logging.getLogger("alone")
    with caplog.at_level(logging.WARNING, "alone"):
        made.resume(folder / name / "iter_3.pth")
        run(made)
    assert "on 2 ranks inside an accumulation window; its gradients are dropped on 1 ranks" in caplog.text
    assert made.iter == 7


@pytest.mark.parametrize("name", ["ddp float32", "ddp autocast", "ddp master"])
def test_a_window_is_reduced_once(ranks: Seen, name: str) -> None:
    """Six iterations are two windows. With masters DDP reduces in each iteration, before the sum in float32."""
    for rank in range(2):
        once, always = ranks[f"{name} once"][rank], ranks[f"{name} always"][rank]
        assert (once["count"], always["count"]) == (6 if "master" in name else 2, 6)
        assert same(once["weights"], always["weights"])
        assert same(once["weights"], ranks[f"{name} once"][0]["weights"])


def test_what_the_reduced_windows_come_to(ranks: Seen) -> None:
    """Against two steps by hand with the mean gradient over the ranks and over the iterations of a window."""
    weight = torch.zeros(2, 3)
    for window in (range(4), range(4, 6)):
        batches = [whole_batch(number, rank) for number in window for rank in range(2)]
        weight -= 0.5 * sum(y.T @ x for x, y in batches) / len(batches)
    assert torch.allclose(ranks["ddp float32 once"][0]["weights"][0], weight)


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
    assert len(saved["ranks"]) == 2
    assert saved["meta"]["hook_msgs"]["best_score"] == 1.0


def test_one_rank_alone_gathers_itself() -> None:
    assert gather({"a": (1, None)}) == [{"a": (1, None)}]
