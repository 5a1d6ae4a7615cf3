"""The scripts of ``examples`` at a small size: they learn, and a resumed run equals an uninterrupted one."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from halfpeak.checkpoint import load
from laws.source import ROOT
from support.states import differences

EXAMPLES = ROOT / "examples"

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a script with options and returns what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES / "openmmlab"))
    monkeypatch.delitem(sys.modules, "digits", raising=False)

    def run(name: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("level", ["auto", "O2"])
def test_a_classifier_learns_and_resumes_bitwise(level: str, run: Run) -> None:
    options = ["--level", level, "--batch", "64", "--accumulate", "2"]
    whole = run("native/digits.py", *options, "--epochs", "2").splitlines()
    parts = run("native/digits.py", *options, "--epochs", "1", "--file", "parts.pt").splitlines()[:-1]
    parts += run("native/digits.py", *options, "--epochs", "2", "--file", "parts.pt", "--resume").splitlines()
    assert parts == whole
    assert float(whole[1].split()[-1]) > 0.8


def test_a_gpt_learns(run: Run) -> None:
    sizes = ["--width", "32", "--layers", "1", "--batch", "8"]
    losses = re.findall(r": (\d\.\d+) nats", run("native/gpt.py", "--level", "O2", "--steps", "30", *sizes))
    assert float(losses[-1]) < float(losses[0]) - 0.5


def test_a_gan_trains_two_networks(run: Run) -> None:
    printed = run("native/gan.py", "--level", "O2", "--steps", "10")
    assert "num_steps=20, num_skipped=0" in printed


WRAPPERS = {
    "plain": ["--wrapper", "OptimWrapper"],
    "amp": ["--wrapper", "AmpOptimWrapper", "--dtype", "bfloat16", "--accumulate", "2"],
    "O2": ["--wrapper", "ApexOptimWrapper", "--opt-level", "O2", "--accumulate", "2"],
}


@pytest.mark.filterwarnings("ignore:.*BatchNorm")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_learns_and_resumes_bitwise(name: str, run: Run) -> None:
    options = [
        *WRAPPERS[name],
        "--batch",
        "350",
    ]  # an even number of batches: no window is open between epochs

    def epochs(*more: str) -> list[str]:
        printed = run("openmmlab/optim_wrapper.py", *options, *more).splitlines()
        return [line for line in printed if line.startswith("epoch")]  # without apex's lines at the start

    whole = epochs("--epochs", "2")
    parts = epochs("--epochs", "1", "--output", "parts")
    parts += epochs("--epochs", "2", "--output", "parts", "--resume")
    assert parts == whole
    assert [float(line.split()[-1]) for line in whole][-1] > 0.6
    one, other = (load(f"{folder}/checkpoint.pth") for folder in ("output", "parts"))
    assert differences(one, other) == []


def test_a_gan_has_a_wrapper_of_another_kind_for_each_network(run: Run) -> None:
    printed = run("openmmlab/optim_wrapper_dict.py", "--steps", "40", "--batch", "32")
    assert len(re.findall(r"step \d+: discriminator [01]\.\d+, generator [01]\.\d+", printed)) == 2
    assert "{'generator.lr': [0.001], 'discriminator.lr': [0.001]}" in printed
    assert "loss scale of the discriminator 65536" in printed


RUNNERS = {
    "float32": ["--mode", "float32"],
    "master": ["--mode", "master", "--dtype", "bfloat16"],
    "autocast, by iteration": ["--by-iter", "--mode", "autocast", "--dtype", "bfloat16", "--accumulate", "2"],
}


@pytest.mark.parametrize("name", RUNNERS)
def test_a_runner_learns_and_resumes_bitwise(name: str, run: Run) -> None:
    by_iter = "--by-iter" in RUNNERS[name]
    options = [*RUNNERS[name], "--batch", "256", "--epochs", "4" if by_iter else "2"]
    # Between two passes over the data, and between two windows.
    first, last = ("iter_10.pth", "iter_20.pth") if by_iter else ("epoch_1.pth", "epoch_2.pth")
    printed = run("openmmlab/runner.py", *options)
    assert printed.startswith("10 steps, validation 0.")
    assert float(printed.split()[-1]) > 0.4
    assert (
        run("openmmlab/runner.py", *options, "--resume-from", f"output/{first}", "--output", "parts")
        == printed
    )
    one, other = (load(f"{folder}/{last}") for folder in ("output", "parts"))
    differing = [
        path for path in differences(one, other) if not path.startswith(("/meta/", "/loop/log_buffer/"))
    ]
    assert differing == []
