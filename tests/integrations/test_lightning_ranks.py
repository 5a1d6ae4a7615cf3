"""The plugin under DistributedDataParallel: ranks stay equal with unreduced passes and an overflow on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.forks import python


def test_ranks_agree_and_compute_what_one_does() -> None:
    pytest.importorskip("lightning.fabric")
    from integrations.lightning_ranks import train

    done = python(str(Path(__file__).with_name("lightning_ranks.py")), "O2", "2")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("WEIGHTS")]
    two = torch.tensor([float(word) for word in line.split()[1:]])
    assert torch.allclose(two, torch.tensor(train("O2", ranks=1)), atol=1e-3)
