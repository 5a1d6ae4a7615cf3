"""The scripts of ``examples/native`` for several processes, on two ranks: they learn, and resume."""

from __future__ import annotations

import re
from pathlib import Path

from distributed.launching import run_as_torchrun
from laws.source import ROOT

SCRIPTS = ("ddp.py", "fsdp2.py", "pipeline.py")


def test_a_script_learns_and_goes_on(tmp_path: Path) -> None:
    printed = run_as_torchrun(
        *(
            [str(ROOT / "examples" / "native" / script), "--folder", str(tmp_path / script), "--steps", steps]
            for script in SCRIPTS
            for steps in ("20", "60")
        )
    )
    for first, more in zip(printed[::2], printed[1::2], strict=True):
        (before, after) = (
            {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}
            for text in (first, more)
        )
        assert list(before) == [10, 20]
        assert list(after) == [30, 40, 50, 60]
        assert min(after.values()) < before[10] - 0.2
