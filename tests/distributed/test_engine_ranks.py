"""The engine on two ranks (gloo): bitwise equal through accumulation, with an inf on one rank and without, and agreed
on skipping where gradients are local to a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed.engine_ranks import LEVELS, RANKS, WINDOWS, scenarios
from laws.source import ROOT

Seen = dict[str, list[Any]]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What every rank saw, by scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    script = Path(__file__).with_name("engine_ranks.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        printed = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(printed)
    files = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]
    return {name: [one[name] for one in files] for name in files[0]}


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


PARALLEL = [
    (level, every, poisoned) for level in LEVELS for every in (1, 3) for poisoned in (None, *range(every))
]


@pytest.mark.parametrize(("level", "every", "poisoned"), PARALLEL)
def test_ranks_stay_equal_and_skip_together(
    ranks: Seen, level: str, every: int, poisoned: int | None
) -> None:
    first, other = ranks[f"parallel {level} {every} {poisoned}"]
    for part in ("parameters", "masters", "momentum"):
        assert same(first[part], other[part])
    assert (first["scale"], first["counters"]) == (other["scale"], other["counters"])
    expected = [True] * WINDOWS
    expected[1] = poisoned is None
    assert first["outcomes"] == other["outcomes"] == expected
    assert all(parameter.isfinite().all() for parameter in first["parameters"])
    dynamic = level in ("O1", "O2")
    assert first["scale"] == ((512.0 if poisoned is not None else 1024.0) if dynamic else 1.0)


@pytest.mark.parametrize("level", LEVELS)
def test_it_does_not_matter_which_micro_batch_overflowed(ranks: Seen, level: str) -> None:
    runs = [ranks[f"parallel {level} 3 {poisoned}"][0] for poisoned in range(3)]
    assert same(runs[0]["parameters"], runs[1]["parameters"])
    assert same(runs[0]["parameters"], runs[2]["parameters"])
    assert not same(runs[0]["parameters"], ranks[f"parallel {level} 3 None"][0]["parameters"])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("poisoned", [False, True])
def test_ranks_with_parameters_of_their_own_skip_together(ranks: Seen, level: str, poisoned: bool) -> None:
    first, other = ranks[f"local {level} {poisoned}"]
    assert not same(first["parameters"], other["parameters"])
    assert first["outcomes"] == other["outcomes"] == [True, not poisoned, True]
    assert (first["scale"], first["counters"]) == (other["scale"], other["counters"])
    assert all(parameter.isfinite().all() for seen in (first, other) for parameter in seen["parameters"])
    # One reduction of the verdict per step, whatever came of it.
    assert first["collectives"] == other["collectives"] == WINDOWS


def test_every_scenario_ran(ranks: Seen) -> None:
    assert ranks.keys() == scenarios().keys()
