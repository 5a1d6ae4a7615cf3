"""``halfpeak train --runner``: the same run as the loop's, resume, accumulation, and settings that do not fit."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from halfpeak.checkpoint import file as checkpoint
from halfpeak.cli.main import main
from halfpeak.cli.options import parse
from halfpeak.cli.train import train
from halfpeak.insight.history import read_rows

SMALL = [
    "--batch",
    "256",
    "--eval-every",
    "3",
    "--save-every",
    "4",
    "--tensorboard",
    "false",
    "--plot",
    "false",
]
ITER = ["--runner", "iter"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, stop_after: int | None = None) -> str:
    """The command in this process, stopped after so many steps; returns what it printed."""
    printed = io.StringIO()
    asked = iter(range(1, 10**9))
    train(
        parse([*arguments]),
        Console(file=printed, width=120),
        lambda: stop_after is not None and next(asked) >= stop_after,
    )
    return printed.getvalue()


def tensors(state: Any, where: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a nested state by its path."""
    if isinstance(state, torch.Tensor):
        return {where: state}
    inner = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {name: value for key, part in inner for name, value in tensors(part, f"{where}/{key}").items()}


@pytest.mark.parametrize(
    ("level", "more"),
    [
        ("O0", []),
        ("O0", ["--accumulate", "2", "--clip-norm", "0.5"]),
        ("O2", ["--clip-norm", "0.5", "--init-loss-scale", "2**24"]),
        ("O5", []),
    ],
)
def test_the_same_numbers_as_from_the_loop(level: str, more: list[str]) -> None:
    options = ["--level", level, *SMALL, "--batch", "32", *more]
    run("--steps", "8", "--output", "loop", *options)
    run("--steps", "8", "--output", "iter", *ITER, *options)
    assert len(read_rows(Path("iter/metrics.jsonl"))) == 11
    assert Path("iter/metrics.jsonl").read_bytes() == Path("loop/metrics.jsonl").read_bytes()


def test_epochs_write_every_result(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batch", "128", "--log-every", "5", "--level", "O4", "--accumulate", "2", "--epochs", "2"]
    assert main(["train", "digits", "--runner", "epoch", "--output", "out", *options]) == 0
    assert "Epoch [2][5/11]" in capsys.readouterr().out
    names = {path.name for path in Path("out").iterdir()}
    assert names >= {"checkpoint.pt", "config.toml", "history.png", "metrics.jsonl", "summary.json"}
    logs = [
        json.loads(line) for path in Path("out").glob("*.log.json") for line in path.read_text().splitlines()
    ]
    assert [row["iter"] for row in logs if row.get("mode") == "train"] == [5, 10, 5, 10]
    summary = json.loads(Path("out/summary.json").read_text())
    assert (summary["steps"], summary["steps_of"], summary["skipped"]) == (11, 11, 0)
    assert summary["validation_accuracy"] > 0.3


@pytest.mark.parametrize(
    ("length", "level"),
    [
        (["--runner", "epoch", "--epochs", "2"], "O1"),
        ([*ITER, "--steps", "10", "--batch", "32"], "O2"),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(length: list[str], level: str) -> None:
    options = [*SMALL, *length, "--level", level, "--accumulate", "2", "--clip-value", "0.1"]
    run("--output", "straight", *options)
    assert "stopped after step 3 of" in run("--output", "stopped", *options, stop_after=3)
    assert "continuing stopped after step 3" in run("--resume", "stopped")
    assert Path("straight/metrics.jsonl").read_bytes() == Path("stopped/metrics.jsonl").read_bytes()
    ours, theirs = (tensors(checkpoint.load(Path(name, "checkpoint.pt"))) for name in ("straight", "stopped"))
    assert len(ours) > 20
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_a_run_can_be_made_longer(capsys: pytest.CaptureFixture[str]) -> None:
    run("--runner", "epoch", "--epochs", "1", "--output", "out", "--level", "O0", *SMALL)
    assert main(["train", "--resume", "out"]) == 2
    assert "is over; write a larger --steps or --epochs" in capsys.readouterr().err
    run("--resume", "out", "--epochs", "2")
    rows = [row for row in read_rows(Path("out/metrics.jsonl")) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[-1]["epoch"] == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*ITER, "--wrapper", "amp"], "runner='iter' and wrapper='amp' exclude each other; give one"),
        ([*ITER, "--level", "O3"], "cannot run at level='O3'"),
        ([*ITER, "--level", "O2", "--master-weights", "false"], "no argument for master_weights=False at O2"),
        ([*ITER, "--level", "O0", "--loss-scale", "8"], "no argument for loss_scale=8.0 at O0; leave it out"),
        (["--runner", "epoch", "--steps", "5"], "counts whole epochs, not steps=5; write epochs=2, or runner='iter'"),
        (["--runner", "epoch", "--epochs", "0.5"], "not epochs=0.5"),
        (["--runner", "loop"], "'epoch', 'iter'"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "digits", "--output", "out", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_run_of_the_loop_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    run("--steps", "2", "--output", "out", "--level", "O0", *SMALL)
    assert main(["train", "--resume", "out", "--steps", "4", *ITER]) == 2
    assert "runner was None and is 'iter'" in capsys.readouterr().err


def test_a_terminal_shows_a_live_display_and_a_file_does_not() -> None:
    plain = run("--steps", "6", "--output", "plain", *ITER, "--level", "O0", *SMALL)
    assert "\x1b" not in plain
    assert "steps," not in plain
    printed = io.StringIO()
    console = Console(file=printed, width=120, force_terminal=True)
    train(parse(["--steps", "6", "--output", "live", *ITER, "--level", "O0", *SMALL]), console, lambda: False)
    text = printed.getvalue()
    assert "6/6" in text
    assert "samples/s" in text
    assert "validation" in text


def test_the_log_says_which_hooks_there_are_and_how_validation_went() -> None:
    printed = run("--steps", "6", "--output", "out", *ITER, "--level", "O0", "--log-every", "2", *SMALL)
    listing = [line for line in printed.splitlines() if "OptimizerHook" in line]
    assert listing == [
        "hooks, in the order of their calls: PlanLrUpdaterHook, OptimizerHook, IterTimerHook, RunnerJob, TextLoggerHook"
    ]
    rows = [row for row in read_rows(Path("out/metrics.jsonl")) if "validation_loss" in row]
    validated = [line for line in printed.splitlines() if line.startswith("Iter(val)")]
    assert [f"loss: {row['validation_loss']:.4f}" in line for row, line in zip(rows, validated, strict=True)]
    assert len(validated) == 2
    (log,) = Path("out").glob("*.log.json")
    modes = [json.loads(line)["mode"] for line in log.read_text().splitlines()[1:]]
    assert modes == ["train", "val", "train", "train", "val"]


@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
def test_validation_computes_in_the_dtype_of_training(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()
    forward = torch.nn.Conv2d.forward

    def watched(self: Any, x: torch.Tensor) -> torch.Tensor:
        found = forward(self, x)
        if not self.training:
            seen.add(found.dtype)
        return found

    monkeypatch.setattr(torch.nn.Conv2d, "forward", watched)
    run("--steps", "1", "--output", "out", *ITER, "--level", level, *SMALL)
    assert seen == {{"O0": torch.float32, "O1": torch.float16, "O5": torch.bfloat16}[level]}
