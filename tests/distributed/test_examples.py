"""The scripts of ``examples/native`` for several processes, on two ranks: they learn, and resume."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from distributed.launching import launch, run_as_torchrun
from laws.source import ROOT

NATIVE = ROOT / "examples" / "native"
SCRIPTS = ("ddp.py", "fsdp2.py", "pipeline.py")


def test_a_script_learns_and_goes_on(tmp_path: Path) -> None:
    printed = run_as_torchrun(
        *(
            [str(NATIVE / script), "--folder", str(tmp_path / script), "--steps", steps]
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


def test_post_training_learns_and_resumes_to_the_bit(tmp_path: Path) -> None:
    runs = (("stopped", "20"), ("stopped", "41"), ("straight", "41"))
    printed = run_as_torchrun(
        *(
            [str(NATIVE / "post_training.py"), "--folder", str(tmp_path / run), "--steps", steps]
            for run, steps in runs
        )
    )
    begun, resumed, straight = (re.findall(r"step .*", text) for text in printed)
    assert begun + resumed == straight
    rewards, ratios, skipped = (
        [float(found) for found in re.findall(pattern, printed[2])]
        for pattern in (r"reward ([\d.]+)", r"ratios ([\d.]+) from 1", r"(\d+) skipped")
    )
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.8
    assert max(ratios) < 1e-3  # in the step after a transfer both compute with the same weights
    assert skipped[-1] > skipped[0] == 0


def test_post_training_gathers_weights_in_float16_alone(tmp_path: Path) -> None:
    """A rank never holds a whole weight in float32, and what it gathers is the rounded weight."""
    for seen in launch("distributed.post_training_ranks", 2, tmp_path)["gathered"]:
        assert seen["dtypes"] == ["torch.float16"]
        assert all(torch.equal(value, seen["rounded"][name]) for name, value in seen["whole"].items())
        assert len(seen["whole"]) == len(seen["rounded"]) > 0
