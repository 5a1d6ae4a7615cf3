"""The command line: help, one message for bad input, and no files from a refused run."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from halfpeak import __version__
from halfpeak.cli.main import COMMANDS, main
from halfpeak.cli.options import LATEST, parse, read_config
from halfpeak.core.errors import ConfigError
from halfpeak.recipes.settings import TrainConfig
from laws.source import ROOT

pytestmark = pytest.mark.usefixtures("own_folder")


def test_python_dash_m_runs_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["halfpeak", "--version"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("halfpeak", run_name="__main__", alter_sys=True)
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"halfpeak {__version__}, torch ")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)


def test_help_comes_without_the_seconds_that_torch_takes_to_import() -> None:
    asked = [["--help"], ["--version"], ["train", "--help"], ["train", "--help-all"], ["migrate", "--help"]]
    program = f"""
import sys
import halfpeak
from contextlib import suppress
from halfpeak.cli.main import main
for arguments in {asked}:
    with suppress(SystemExit):
        main(arguments)
assert "torch" not in sys.modules
halfpeak.prepare
assert "torch" in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: halfpeak") == 4


def test_help_of_train_names_ten_options_and_help_all_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as caught:
            main(["train", option])
        assert caught.value.code == 0
        shown.append(capsys.readouterr().out)
    short, printed = shown
    assert len(re.findall(r"^\W*--[a-z]", short, re.MULTILINE)) == 11  # ten settings, and --help-all
    assert short.count("halfpeak train ") == 4  # the usage, and three examples
    names = [item.name for item in fields(TrainConfig) if item.name != "recipe"]
    missing = [name for name in names if f"--{name.replace('_', '-')} " not in printed]
    assert missing == []
    assert "digits 64, pysource 16" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["fly"], "unknown command 'fly'; write one of train, doctor"),
        (["train", "digit"], "did you mean digits?"),
        (["train", "--level", "02"], "letter O, not the digit zero"),
        (["train", "--level", "O1", "--master-weights", "true"], "makes no sense with opt_level='O1'"),
        (["train", "--lavel", "O2"], "'--lavel'; did you mean --level? halfpeak train --help"),
        (["train", "digits", "extra"], "unknown option 'extra'; halfpeak train --help lists them"),
        (["train", "--steps"], "argument --steps: expected one argument; halfpeak train --help"),
        (["train", "--batch", "5000"], "batch=5000 is more than the 1438 training samples"),
        (["train", "--device", "tpu"], "device='tpu' is not on this machine"),
        (["train", "--config", "absent.toml"], "cannot be read: No such file"),
        (["train", "--config", "settings.ini"], "must end in .toml, .json, .yaml, .yml"),
        (["train", "--resume", "absent"], "there is no folder absent"),
        (["train", "--resume"], "there is no run under"),
        (["train", "--resume", "a", "--output", "b"], "leave --output b out"),
    ],
)
def test_bad_input_is_one_message_and_status_2(
    arguments: list[str], message: str, own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert list(own_folder.iterdir()) == []


def test_processes_that_cannot_join_are_refused_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert main(["train"]) == 2
        told = capsys.readouterr().err.splitlines()
        assert len(told) == lines
        assert all("2 processes cannot join:" in line for line in told)


def test_a_folder_with_a_run_in_it_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/metrics.jsonl").write_text('{"step": 1}\n')
    assert main(["train", "--steps", "1", "--output", "out"]) == 2
    assert "--resume out to continue it" in capsys.readouterr().err
    assert Path("out/metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_file_that_is_no_checkpoint_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/checkpoint.pt").write_bytes(b"nothing of the kind")
    assert main(["train", "--resume", "out"]) == 2
    assert "checkpoint.pt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "resume"),
    [
        (["--resume"], LATEST),
        (["--resume", "--steps", "3"], LATEST),
        (["--resume", "folder", "--steps", "3"], "folder"),
        (["--resume=folder"], "folder"),
        ([], None),
    ],
)
def test_resume_takes_a_path_or_none(arguments: list[str], resume: str | None) -> None:
    assert parse(arguments).resume == resume


def test_what_was_not_typed_is_not_given() -> None:
    request = parse(["pysource", "--clip-norm", "0.5", "--seed", "2"])
    assert request.values == {"recipe": "pysource", "clip_norm": "0.5", "seed": "2"}
    assert request.config is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'level = "O2"\nlr = 1e-3\nplot = false\n'),
        ("a.json", '{"level": "O2", "lr": 1e-3, "plot": false}'),
        ("a.yaml", "level: O2\nlr: 0.001\nplot: false\n"),
        ("a.yml", "{level: O2, lr: 0.001, plot: no}"),
    ],
)
def test_config_files_are_read_alike(name: str, text: str) -> None:
    Path(name).write_text(text)
    assert read_config(Path(name)) == {"level": "O2", "lr": 0.001, "plot": False}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "level = ", "is not valid TOML"),
        ("a.json", "{", "is not valid JSON"),
        ("a.yaml", "a: [", "is not valid YAML"),
        ("a.yaml", "- 1\n- 2\n", "must be a table of settings"),
        ("a.json", "3", "must be a table of settings"),
        (
            "a.toml",
            "master_wieghts = true\n",
            r"config 'a.toml': unknown setting 'master_wieghts'; did you mean",
        ),
        ("a.json", '{"lr": "fast"}', r"config 'a.json': lr='fast' must be a number"),
        ("a.yaml", "level: !!python/object/apply:os.mkdir ['pwned']\n", "is not valid YAML"),
    ],
)
def test_config_files_are_data_only(name: str, text: str, message: str) -> None:
    Path(name).write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(Path(name))
    assert "\n" not in str(caught.value)
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("module", "package"), [("rich.console", "rich"), ("sklearn.datasets", "scikit-learn")]
)
def test_a_missing_extra_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["train", "--steps", "1"]) == 2
    message = f"halfpeak train: {package} is not installed; write pip install {package}\n"
    assert capsys.readouterr().err == message


def test_train_without_extras_names_all_that_it_misses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ("rich", "sklearn", "matplotlib", "tensorboard")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "halfpeak.core.extras.find_spec", lambda name: None if name in missing else find_spec(name)
    )
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == (
        "halfpeak train: rich, scikit-learn, matplotlib and tensorboard are not installed; write pip install rich "
        "scikit-learn matplotlib tensorboard, or pip install '.[all]' in a clone of halfpeak\n"
    )


def test_a_missing_matplotlib_costs_only_the_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["train", "--steps", "1", "--tensorboard", "false", "--output", "out"]) == 0
    assert "no picture: matplotlib is not installed; write pip install matplotlib" in capsys.readouterr().out
    assert not Path("out/history.png").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_tells_of_resume_where_there_is_one(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(arguments: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"halfpeak.cli.{name}.main", stopped)
    assert main([name]) == 130
    assert ("--resume" in capsys.readouterr().err) == (name == "train")


def test_a_reader_that_leaves_early_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``halfpeak migrate . | head -n 1``."""
    Path("old.py").write_text("from apex import amp\n" * 9)
    reader, writer = os.pipe()
    os.close(reader)
    # Line-buffered, so that the first line is written to the closed pipe.
    with open(writer, "w", buffering=1) as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert main(["migrate", "."]) == 1
        sys.stdout.flush()  # as the interpreter does at exit
