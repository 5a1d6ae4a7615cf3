"""``halfpeak train`` under torchrun, with ranks killed or asked to end: the result is bitwise that of a calm run.

``HALFPEAK_THOROUGH=1`` kills twenty ranks.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from distributed.kills import STEPS, changed, command, kill, ranks_of, start, wait_for_rows
from distributed.launching import run_as_torchrun

KILLS = 20 if os.environ.get("HALFPEAK_THOROUGH") == "1" else 3
LAUNCHER = "distributed.forking_torchrun"
"""Forks ranks that have imported torch. Only the test without it has torchrun start ranks, which import torch."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic") / "run"
    run_as_torchrun(command(folder))
    return folder


@pytest.mark.timeout(1800)
def test_killed_ranks_change_no_bit(undisturbed: Path, tmp_path: Path) -> None:
    done, _ = kill(tmp_path / "run", KILLS, start_up=1, launcher=LAUNCHER)
    assert done == KILLS
    assert changed(undisturbed, tmp_path / "run") == set()


def test_who_is_left_says_in_one_line_that_a_rank_has_died(tmp_path: Path) -> None:
    # The long interval gives the other rank time to report before torchrun notices and ends it.
    run = start(tmp_path / "run", monitor=10)
    wait_for_rows(run, tmp_path / "run", 0)
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    printed, _ = run.communicate(timeout=120)
    assert printed.count("could not reach another rank, which has died or hangs") == 1
    assert "RuntimeError" not in printed


def test_ranks_that_are_asked_to_end_save_first(undisturbed: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", launcher=LAUNCHER)
    wait_for_rows(run, tmp_path / "run", 0)
    run.send_signal(signal.SIGTERM)
    printed, _ = run.communicate(timeout=60)
    # The ranks finish the present step together, long before torchrun would kill them.
    assert printed.count(f"of {STEPS}, saved. Continue with:") == 1
    run_as_torchrun(command(tmp_path / "run"))
    assert changed(undisturbed, tmp_path / "run") == set()
