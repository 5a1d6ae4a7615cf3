"""The plugin under DistributedDataParallel: no rank drifts where gradients wait unreduced, or overflow on one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from laws.source import ROOT


def test_ranks_agree_and_compute_what_one_does() -> None:
    pytest.importorskip("lightning.fabric")
    from integrations.lightning_ranks import train

    script = Path(__file__).with_name("lightning_ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), "O2", "2"],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("WEIGHTS")]
    two = torch.tensor([float(word) for word in line.split()[1:]])
    assert torch.allclose(two, torch.tensor(train("O2", ranks=1)), atol=1e-3)
