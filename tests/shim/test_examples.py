"""The scripts of ``examples/apex``, unedited, under ``halfpeak run --device cpu``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed.launching import run_as_torchrun
from halfpeak.cli.main import main
from laws.source import ROOT
from shim.process import changes, process_state

FOLDER = ROOT / "examples" / "apex"


def run(name: str, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a script in this process, which it must leave unchanged; return its output."""
    before = process_state()
    status = main(["run", "--device", "cpu", str(FOLDER / name), *arguments])
    seen = capsys.readouterr()
    assert status == 0, seen.err
    assert not changes(before)
    return seen.out


def losses(text: str, label: str = "loss") -> list[float]:
    return [float(number) for number in re.findall(rf"{label} ([-+.\de]+)", text)]


def falls(values: list[float], factor: float) -> bool:
    third = max(1, len(values) // 3)
    return sum(values[-third:]) < factor * sum(values[:third])


RUNS: dict[str, tuple[str, float]] = {
    "classifier.py --opt-level O0": ("loss", 0.1),
    "classifier.py": ("loss", 0.1),
    "classifier.py --opt-level O2 --keep-batchnorm-fp32 True --loss-scale 128.0": ("loss", 0.1),
    "classifier.py --opt-level O3 --sync-bn": ("loss", 0.1),
    "transformer_lamb.py": ("loss", 0.3),
    "transformer_lamb.py --opt-level O2 --optimizer adam": ("loss", 0.3),
    "multitask.py --opt-level O1": ("order", 0.6),
    "multitask.py": ("sum", 0.6),
    "contrastive_larc.py": ("loss", 0.1),
    "contrastive_larc.py --fp32": ("loss", 0.1),
}
"""Command -> the label of the loss that it prints, and the factor below which that must fall."""


@pytest.mark.parametrize("command", RUNS)
def test_it_runs_unedited_and_learns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    label, factor = RUNS[command]
    found = losses(run(*command.split(), capsys=capsys), label)
    assert len(found) > 3
    assert falls(found, factor), found


def test_on_two_ranks() -> None:
    commands = {
        "classifier.py --sync-bn": ("loss", 0.1),
        "multitask.py": ("maximum", 0.6),
        "contrastive_larc.py --group 2": ("loss", 0.1),
    }
    start = ["-m", "halfpeak", "run", "--device", "cpu"]
    scripts = [[str(FOLDER / name), *rest] for name, *rest in map(str.split, commands)]
    printed = run_as_torchrun(*(start + script for script in scripts))
    for text, (label, factor) in zip(printed, commands.values(), strict=True):
        assert text.count("halfpeak run: halfpeak") == 1
        assert falls(losses(text, label), factor), text


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gan_trains_with_three_scalers(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run("gan.py", "--opt-level", level, capsys=capsys)
    found = losses(text, "critic")
    assert min(found) < 1.2 < found[0]
    assert text.rstrip().splitlines()[-1].count("unskipped") == 3


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_resumed_run_prints_what_an_unbroken_one_prints(
    level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(folder: str, epochs: int) -> list[str]:
        where = ["--folder", str(tmp_path / folder), "--opt-level", level]
        text = run("resume.py", *where, "--epochs", str(epochs), capsys=capsys)
        return [line for line in text.splitlines() if line.startswith("epoch")]

    whole = train("whole", 4)
    assert train("parts", 2) + train("parts", 4) == whole
    assert len(whole) == 24
    assert falls(losses("\n".join(whole)), 0.6)
