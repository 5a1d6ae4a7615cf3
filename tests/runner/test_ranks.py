"""Two ranks (gloo) share one file, and each goes on with random numbers and data of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halfpeak.runner.gather import gather
from laws.source import ROOT
from runner.resume_ranks import KINDS, STOPS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    script = Path(__file__).with_name("resume_ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), "2", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", STOPS)
def test_a_resume_is_bitwise_on_every_rank(ranks: list[dict[str, Any]], kind: str, stop: int) -> None:
    assert [rank[f"{kind} {stop}"] for rank in ranks] == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_draw_differently_and_stay_equal(ranks: list[dict[str, Any]], kind: str) -> None:
    """Otherwise the test above could pass with the random numbers of one rank for all."""
    first, second = (rank[kind] for rank in ranks)
    assert not torch.equal(first["random"], second["random"])
    assert torch.equal(first["weight"], second["weight"])


def test_one_rank_alone_gathers_itself() -> None:
    assert gather({"a": (1, None)}) == [{"a": (1, None)}]
