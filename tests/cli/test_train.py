"""``halfpeak train`` as a user runs it: output, files, interruption, and a bitwise equal resumed run."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tomllib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import torch
from rich.console import Console

import halfpeak
from halfpeak.checkpoint import file as checkpoint
from halfpeak.cli.interrupt import Interrupt
from halfpeak.cli.main import main
from halfpeak.cli.options import parse
from halfpeak.cli.train_run import train
from halfpeak.core.errors import ConfigError
from halfpeak.core.suitable import suitable_level
from halfpeak.insight.history import read_rows
from halfpeak.recipes.training import Step, Training
from support.damage import flip
from support.states import differences

SMALL = [
    "--batch",
    "8",
    "--eval-every",
    "4",
    "--save-every",
    "5",
    "--tensorboard",
    "false",
    "--plot",
    "false",
]


pytestmark = pytest.mark.usefixtures("own_folder")


def run(*arguments: str, stop_after: int | None = None, terminal: bool = False) -> str:
    """Run the command in this process, stopped after ``stop_after`` steps; return what it printed."""
    printed = io.StringIO()
    console = Console(file=printed, width=120, force_terminal=terminal)
    train(parse([*arguments]), console, stopper(stop_after))
    return printed.getvalue()


def stopper(after: int | None) -> Callable[[], bool]:
    asked = iter(range(1, 10**9))
    return lambda: after is not None and next(asked) >= after


def assert_same_run(one: str, other: str) -> None:
    """Assert that both folders hold bitwise equal states and metrics."""
    assert Path(one, "metrics.jsonl").read_bytes() == Path(other, "metrics.jsonl").read_bytes()
    first, second = (checkpoint.load(Path(folder, "checkpoint.pt")) for folder in (one, other))
    assert set(differences(first, second)) <= {"/seconds", "/plan/output"}


def test_a_whole_run_writes_its_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--epochs", "2", "--output", "out"]) == 0
    printed = capsys.readouterr().out
    assert f"digits at level {suitable_level('cpu').level} on cpu: this CPU" in printed
    assert "step 44/44  loss" in printed
    for name in ("loss", "accuracy", "scale", "skipped", "grad norm", "samples/s"):
        assert f"  {name} " in printed
    names = {path.name for path in Path("out").iterdir()}
    assert names >= {
        "checkpoint.pt",
        "config.toml",
        "history.png",
        "metrics.jsonl",
        "summary.json",
        "tensorboard",
    }
    assert Path("out/history.png").read_bytes().startswith(b"\x89PNG")
    assert list(Path("out/tensorboard").iterdir())
    rows = read_rows(Path("out/metrics.jsonl"))
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 45))
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["validation_accuracy"] == rows[-1]["validation_accuracy"] > 0.9
    assert summary["versions"]["halfpeak"] == halfpeak.__version__
    assert datetime.fromisoformat(summary["date"]).tzinfo is not None


def test_the_written_config_repeats_the_run() -> None:
    printed = run("--steps", "6", "--level", "O4", "--seed", "3", "--output", "one", *SMALL)
    assert printed.startswith("digits at level O4 on cpu\n")
    assert tomllib.loads(Path("one/config.toml").read_text())["level"] == "O4"
    run("--config", "one/config.toml", "--output", "two")
    assert_same_run("one", "two")


def test_the_command_line_wins_over_the_file() -> None:
    Path("settings.yaml").write_text("level: O0\nseed: 5\nepochs: 3\nbatch: 8\nplot: no\ntensorboard: no\n")
    run("--config", "settings.yaml", "--steps", "2", "--seed", "6", "--output", "out")
    used = tomllib.loads(Path("out/config.toml").read_text())
    assert (used["level"], used["seed"], used["steps"], used["batch"]) == ("O0", 6, 2, 8)


@pytest.mark.parametrize(
    ("level", "more"),
    [
        ("O0", ["--accumulate", "2"]),
        ("O5", ["--optimizer", "adamw", "--lr", "0.001", "--clip-norm", "0.5"]),
        # The scale starts so high that a run stopped after one step is stopped among its skipped steps.
        ("O2", ["--init-loss-scale", "524288"]),
    ],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(level: str, more: list[str]) -> None:
    arguments = ["--level", level, "--steps", "9", *more, *SMALL]
    run(*arguments, "--output", "whole")
    for stop_after in (1, 6):
        parts = f"parts{stop_after}"
        printed = run(*arguments, "--output", parts, stop_after=stop_after)
        assert f"stopped after step {stop_after} of 9, saved" in printed
        assert ("float16 is 2 to 100 times slower" in printed) == (level == "O2")
        assert f"halfpeak train --resume {parts}" in printed
        torch.manual_seed(99)
        torch.rand(7)
        assert f"continuing {parts} after step {stop_after}" in run("--resume", parts)
        assert_same_run("whole", parts)
    if level == "O2":
        assert 1 < checkpoint.load("whole/checkpoint.pt")["taken"] < 8


@pytest.mark.parametrize("more", [[], ["--float8", "tensorwise"]])
def test_a_transformer_resumes_bitwise(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(60):
        (library / f"module{number}.py").write_text(f"value = {number}\n" * 40)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    arguments = ["pysource", "--level", "O5", "--steps", "4", "--context", "16", *more, *SMALL]
    run(*arguments, "--output", "whole")
    run(*arguments, "--output", "parts", stop_after=2)
    run("--resume", "parts")
    assert_same_run("whole", "parts")
    (library / "module1.py").write_text("value = 'changed'\n" * 80)
    assert main(["train", "--resume", "parts", "--steps", "5"]) == 2


def test_a_run_may_be_made_longer() -> None:
    run("--steps", "4", "--output", "out", *SMALL)
    assert main(["train", "--resume", "out"]) == 2
    printed = run("--resume", "out", "--steps", "6")
    assert "the learning rate has fallen by step 4 and stays there" in printed
    rates = [row["lr"] for row in read_rows(Path("out/metrics.jsonl")) if "lr" in row]
    assert len(rates) == 6
    run("--steps", "6", "--schedule-steps", "4", "--output", "at-once", *SMALL)
    ours, theirs = (checkpoint.load(f"{name}/checkpoint.pt")["driver"] for name in ("out", "at-once"))
    assert differences(ours, theirs) == []


def test_resume_without_a_path_takes_the_newest_run() -> None:
    run("--steps", "4", *SMALL, stop_after=2)
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("digits-O5-")
    assert f"continuing {folder} after step 2" in run("--resume")


def test_resume_auto_begins_a_run_goes_on_with_it_and_leaves_a_finished_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("--steps", "4", "--output", "whole", *SMALL)
    again = ("--steps", "4", "--output", "out", "--resume", "auto", *SMALL)
    Path("out").mkdir()
    Path("out/metrics.jsonl").write_text("")  # from a run killed before its first checkpoint
    assert "continuing" not in run(*again, stop_after=2)
    assert "continuing out after step 2" in run(*again)
    assert_same_run("out", "whole")
    assert "the run in out has finished all 4 steps" in run(*again)
    assert main(["train", "--resume", "auto"]) == 2
    assert "--resume auto needs --output" in capsys.readouterr().err


def test_changed_settings_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    run("--steps", "4", "--output", "out", *SMALL, stop_after=2)
    before = Path("out/metrics.jsonl").read_bytes()
    assert main(["train", "--resume", "out", "--lr", "0.5", "--level", "O0"]) == 2
    message = capsys.readouterr().err
    assert "level was 'O5' and is 'O0'" in message
    assert "lr was 0.1 and is 0.5" in message
    assert Path("out/metrics.jsonl").read_bytes() == before


def test_a_damaged_checkpoint_falls_back_to_the_one_before() -> None:
    run("--steps", "9", "--output", "whole", *SMALL)
    run("--steps", "9", "--output", "parts", *SMALL, stop_after=7)
    flip("parts/checkpoint.pt")
    printed = run("--resume", "parts")
    assert "note: " in printed
    assert "continuing parts after step 5" in printed
    assert_same_run("whole", "parts")


def test_a_longer_run_keeps_its_length_when_it_falls_back() -> None:
    run("--steps", "4", "--output", "out", *SMALL)
    run("--resume", "out", "--steps", "8", stop_after=1)
    flip("out/checkpoint.pt")
    assert "continuing out after step 4" in run("--resume", "out")
    assert checkpoint.load("out/checkpoint.pt")["step"] == 8


def test_a_run_without_a_readable_checkpoint_says_how_to_start_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("--steps", "2", "--output", "out", *SMALL, stop_after=1)
    flip("out/checkpoint.pt")
    again = (
        "There is no earlier checkpoint to go back to; start again: halfpeak train --config out/config.toml\n"
    )
    assert main(["train", "--resume", "out"]) == 2
    assert capsys.readouterr().err.endswith(again)
    Path("out/checkpoint.pt").unlink()
    assert main(["train", "--resume", "out"]) == 2
    message = capsys.readouterr().err
    assert message.endswith(again)
    assert message.count("out/checkpoint.pt") == 1
    assert main(["train", "--config", "out/config.toml"]) == 0


def test_another_environment_is_mentioned() -> None:
    run("--steps", "4", "--output", "run[/x]", *SMALL, stop_after=2)  # a name that looks like markup
    state = checkpoint.load("run[/x]/checkpoint.pt")
    state["environment"]["torch"] = "1.0\x1b[31m"
    checkpoint.save("run[/x]/checkpoint.pt", state)
    printed = run("--resume", "run[/x]")
    assert "note: torch was 1.0\\x1b[31m and is" in printed
    assert "run[/x]/" in printed


def test_impossible_parts_of_a_checkpoint_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    run("--steps", "4", "--output", "out", *SMALL, stop_after=2)
    state = checkpoint.load("out/checkpoint.pt")
    gone = dict.fromkeys(("fingerprint", "environment", "step", "taken", "seconds", "driver", "random"))
    impossible = {"step": float("nan"), "taken": -1, "seconds": float("inf"), "environment": {"torch": 1}}
    for name, value in [*gone.items(), *impossible.items(), ("random", {"python": 3}), ("driver", {})]:
        checkpoint.save("out/checkpoint.pt", {**state, name: value})
        assert main(["train", "--resume", "out"]) == 2, name
        assert len(capsys.readouterr().err.splitlines()) == 1
    checkpoint.save("out/checkpoint.pt", state)
    foreign = '{"step": 1, "loss": "low"}\n{"step": true}\n[1]\n{"step": 2, "loss": ' + "9" * 5000 + "}\n"
    Path("out/metrics.jsonl").write_text(foreign)
    assert "continuing out after step 2" in run("--resume", "out")


def test_the_threads_of_a_run_end_with_it() -> None:
    def used(folder: str) -> str:
        return checkpoint.load(f"{folder}/checkpoint.pt")["environment"]["threads"]

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run("--steps", "4", "--output", "one", *SMALL, stop_after=2)
        assert (used("one"), torch.get_num_threads()) == ("1", 3)
        printed = run("--resume", "one", "--threads", "2", stop_after=1)
        assert "note: threads was 1 and is 2; the run goes on, but not bit for bit" in printed
        assert (used("one"), torch.get_num_threads()) == ("2", 3)
        assert "note: threads" not in run("--resume", "one")
        with pytest.raises(ConfigError, match="threads=1025 must be 1024 or less"):
            run("--threads", "1025")
    finally:
        torch.set_num_threads(before)


def test_float16_on_a_cpu_is_called_slow_once() -> None:
    assert run("--steps", "1", "--level", "O3", "--output", "a", *SMALL).count("slower than float32") == 1
    assert "slower" not in run("--steps", "1", "--level", "O4", "--output", "b", *SMALL)


def test_a_terminal_gets_a_live_display() -> None:
    printed = run("--steps", "12", "--output", "out", *SMALL, terminal=True)
    assert "\x1b[" in printed
    for text in ("digits O5", "12/12", "grad norm", "samples/s", "validation"):
        assert text in printed
    assert "step 12/12" not in printed


def test_a_collapsed_loss_scale_ends_the_run_with_its_picture(capsys: pytest.CaptureFixture[str]) -> None:
    high = ["--loss-scale", "1e38", "--level", "O2", "--steps", "200"]
    assert main(["train", *high, "--batch", "2", "--tensorboard", "false", "--output", "out"]) == 1
    captured = capsys.readouterr()
    assert "gradients stay non-finite" in captured.err
    assert "Traceback" not in captured.err
    assert Path("out/history.png").exists()
    assert all(row["skipped"] for row in read_rows(Path("out/metrics.jsonl")) if "loss" in row)


def test_a_step_that_goes_wrong_is_diagnosed_in_the_folder_of_the_run() -> None:
    high = ["--loss-scale", "1e38", "--level", "O2", "--steps", "2", "--diagnose"]
    run(*high, "--output", "out", *SMALL)
    (report,) = Path("out").glob("diagnosis-*.json")
    assert report.name == "diagnosis-1.json"
    assert json.loads(report.read_text())["where"] == "backward"


def test_the_first_signal_asks_and_the_second_stops(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt() as interrupt:
        assert not interrupt.requested()
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested()
        assert "stopping after this step" in capfd.readouterr().err  # before the step ends, which may be slow
        assert interrupt.exit_status == 143
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_saves_and_the_run_continues_bitwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--level", "O5", "--steps", "6", "--output"]
    advance = Training.advance

    def interrupted(training: Training) -> Step:
        if training.step == 2:
            signal.raise_signal(signal.SIGINT)
        return advance(training)

    run(*arguments, "whole", *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(Training, "advance", interrupted)
        patch.setattr(sys, "argv", ["/some/.venv/bin/halfpeak"])
        patch.setenv("PATH", "")
        assert main(["train", *arguments, "parts", *SMALL]) == 130
    printed = capsys.readouterr().out
    assert "stopped after step 3 of 6, saved" in printed
    (command,) = (line.strip() for line in printed.splitlines() if "train --resume parts" in line)
    assert command == "/some/.venv/bin/halfpeak train --resume parts"  # the command as it was given
    run("--resume", "parts")
    assert_same_run("whole", "parts")


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("recipe", ["digits", "pysource"])
def test_an_accelerator_resumes_bitwise(recipe: str, level: str) -> None:
    arguments = [recipe, "--level", level, "--steps", "9", *SMALL]
    run(*arguments, "--output", "whole")
    run(*arguments, "--output", "parts", stop_after=4)
    run("--resume", "parts")
    assert_same_run("whole", "parts")


def link_outside(path: Path) -> None:
    path.symlink_to("../outside")


# No pipe named metrics.jsonl: unlike a broken link, it would mean that the folder holds a run.
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (link_outside, ("config.toml", "summary.json", "metrics.jsonl", "history.png")),
        (os.mkfifo, ("config.toml", "summary.json", "history.png")),
    ],
    ids=["links", "pipes"],
)
def test_what_lies_in_the_output_folder_is_replaced_not_written_through(
    own_folder: Path, make: Callable[[Path], object], names: tuple[str, ...]
) -> None:
    folder = own_folder / "out"
    folder.mkdir()
    for name in names:
        make(folder / name)
    run("digits", "--steps", "2", "--output", "out", *SMALL, "--plot", "true")
    assert not (own_folder / "outside").exists()
    assert all((folder / name).is_file() and not (folder / name).is_symlink() for name in names)
