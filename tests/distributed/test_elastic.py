"""Workers under torchrun that are killed, or asked to end: training comes to the same bits.

``HALFPEAK_THOROUGH=1`` kills twenty times.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from laws.source import ROOT

KILLS = 20 if os.environ.get("HALFPEAK_THOROUGH") == "1" else 3


def start(folder: Path, kills: int = 0) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={KILLS}"]
    command += ["--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    script = str(Path(__file__).parent / "elastic_worker.py")
    return subprocess.Popen(
        [*command, script, str(folder), str(kills)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(run: subprocess.Popen[str], folder: Path) -> str:
    _, errors = run.communicate(timeout=900)
    assert run.returncode == 0, errors
    return (folder / "result").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("elastic") / "run"
    return result(start(folder), folder)


@pytest.mark.timeout(1800)
def test_killed_workers_change_no_bit(undisturbed: str, tmp_path: Path) -> None:
    assert result(start(tmp_path / "run", KILLS), tmp_path / "run") == undisturbed


def test_a_worker_that_is_asked_to_end_saves_first(undisturbed: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder)
    # Workers finish the step that they are in, save and leave together, long before torchrun would kill them.
    while not (folder / "progress").exists():
        assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    assert result(start(folder), folder) == undisturbed
