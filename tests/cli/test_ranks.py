"""``torchrun -m halfpeak train --runner``: two processes train as one, on gloo and the loopback interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halfpeak.checkpoint import file as checkpoint
from halfpeak.cli import ranks
from halfpeak.cli.main import main
from halfpeak.insight.history import read_rows
from laws.source import ROOT

OPTIONS = [
    *("--level", "O5", "--accumulate", "2", "--batch", "256", "--log-every", "2"),
    *("--eval-every", "2", "--tensorboard", "false", "--plot", "false"),
]


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "COLUMNS": "160",
    }
    start = ["--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *start, "-m", "halfpeak", "train", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ``both`` is: a run of two processes, which two others made longer. What they printed is beside it."""
    folder = tmp_path_factory.mktemp("ranks")
    begin = ["digits", "--runner", "epoch", "--epochs", "1", "--output", "both", *OPTIONS]
    printed = ""
    for arguments in (begin, ["--resume", "both", "--epochs", "2"]):
        done = torchrun(folder, *arguments)
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    (folder / "printed.txt").write_text(printed)
    return folder


def test_two_processes_train_as_one_would(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near it, because each rank has batch-norm statistics of its own; the schedule is the same."""
    monkeypatch.chdir(tmp_path)
    begin = ["digits", "--runner", "epoch", "--epochs", "1", "--output", "alone", *OPTIONS]
    assert main(["train", *begin]) == 0
    assert main(["train", "--resume", "alone", "--epochs", "2"]) == 0
    both, alone = (read_rows(path / "metrics.jsonl") for path in (folder / "both", tmp_path / "alone"))
    assert [row["step"] for row in both] == [row["step"] for row in alone]
    assert [row["step"] for row in both if "loss" in row] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(both, alone, strict=True):
        assert ours.keys() == theirs.keys()
        name = "loss" if "loss" in ours else "validation_loss"
        assert ours[name] == pytest.approx(theirs[name], rel=0.15)
        assert ours.get("lr") == theirs.get("lr")


def test_one_of_them_prints_and_writes(folder: Path) -> None:
    printed = (folder / "printed.txt").read_text()
    assert (
        printed.count("digits at level O5 on cpu") == printed.count("hooks, in the order of their calls") == 2
    )
    logs = sorted((folder / "both").glob("*.log.json"))
    rows = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    assert [row.get("mode") for row in rows].count("val") == printed.count("Epoch(val)") == 4
    assert [row["processes"] for row in rows if "processes" in row] == [2] * len(logs)
    summary = json.loads((folder / "both" / "summary.json").read_text())
    assert (summary["steps"], summary["skipped"]) == (6, 0)  # each epoch ends inside a window


def test_each_keeps_random_numbers_of_its_own(folder: Path) -> None:
    state = checkpoint.load(folder / "both" / "checkpoint.pt")
    first, second = (rank["random"]["cpu"] for rank in state["ranks"])
    assert not torch.equal(first, second)
    assert state["loop"]["world_size"] == 2


@pytest.mark.parametrize(
    ("processes", "arguments", "message"),
    [
        ("2", ["digits"], "2 processes need a runner to train together; write --runner epoch"),
        ("3", ["digits", "--runner", "epoch", "--batch", "64"], "write --batch 63"),
        ("2", ["digits", "--runner", "iter", "--device", "cuda:0"], "write device='cuda', and each takes its own"),
    ],
)  # fmt: skip
def test_what_several_processes_cannot_do(
    processes: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", processes)
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_another_number_of_processes_does_not_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(folder)
    assert main(["train", "--resume", "both", "--epochs", "9"]) == 2
    assert "begun by 2 processes and is not continued by 1" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_the_backend_is_that_of_the_device(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, str]] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ranks, "find_device", torch.device)
    monkeypatch.setattr(ranks, "init_dist", lambda launcher, backend: started.append((launcher, backend)))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: started.append(("end", "")))
    with ranks.processes(device):
        assert started == [("pytorch", backend)]
    assert started[-1] == ("end", "")
