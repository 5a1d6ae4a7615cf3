"""The scripts of ``examples/native`` for several processes, under torchrun with two ranks: they learn, and go on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from laws.source import ROOT


def run(script: str, folder: Path, steps: int) -> dict[int, float]:
    """The loss at each step that the script has printed."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"),
            *(str(ROOT / "examples" / "native" / script), "--folder", str(folder), "--steps", str(steps)),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", done.stdout)}


@pytest.mark.parametrize("script", ["ddp.py", "fsdp2.py"])
def test_a_script_learns_and_goes_on(script: str, tmp_path: Path) -> None:
    first, more = run(script, tmp_path / "run", 20), run(script, tmp_path / "run", 60)
    assert list(first) == [10, 20]
    assert list(more) == [30, 40, 50, 60]
    assert min(more.values()) < first[10] - 0.2
