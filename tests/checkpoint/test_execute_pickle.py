"""The explicit way for files that are not plain data: another process runs them, never this one."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoint.payloads import CODE, PROTO, archive, op
from halfpeak.checkpoint import convert, inspect, load
from halfpeak.checkpoint.reading import offline
from halfpeak.checkpoint.reading.offline import execute_pickle
from halfpeak.core.errors import CheckpointError, ConfigError, StateError

SOURCE = Path(__file__).parents[2] / "src"

CLASSES = """
from collections import namedtuple
class Meter:
    def __init__(self, value):
        self.value, self.history = value, [1.0, 2.0]
class Slotted:
    __slots__ = ("hidden",)
Point = namedtuple("Point", "x y")
def schedule(step): return step
"""
"""A module of somebody's training script."""

MAKE = """
import torch, numpy
from training import Meter, Slotted, Point, schedule
torch.save({
    "model": {"w": torch.arange(3.0)},
    "optimizer": {"state": {}, "param_groups": [{"lr": numpy.float64(0.1), "params": [0]}]},
    "meter": Meter(0.5),
    "best": numpy.float32(0.25),
    "array": numpy.arange(3),
    "point": Point(1, 2),
    "slots": Slotted(),
    "schedule": schedule,
    "names": {"b"},
}, "a.pt")
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module and a checkpoint that needs it, made by a process that had it."""
    pytest.importorskip("numpy")
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "training.py").write_text(CLASSES)
    subprocess.run([sys.executable, "-c", MAKE], cwd=folder, check=True)
    return folder


@pytest.fixture
def folder(elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that checkpoint, in a process that finds the module only by asking for it."""
    shutil.copy(elsewhere / "a.pt", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{SOURCE}{os.pathsep}{elsewhere}")
    return tmp_path


def test_objects_become_data_or_are_listed(folder: Path) -> None:
    assert {"training.Meter", "training.schedule"} <= set(inspect("a.pt").wants)
    done = convert("a.pt", "grad_scaler", "b.pt", scale=64.0, unsafe_execute_pickle=True)
    kept = load("b.pt")
    assert kept["meter"] == {"value": 0.5, "history": [1.0, 2.0]}
    assert (kept["best"], kept["point"], kept["names"]) == (0.25, [1, 2], ["b"])
    assert torch.equal(kept["array"], torch.arange(3))
    assert torch.equal(kept["model"]["w"], torch.arange(3.0))
    assert kept["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert set(done.notes) == {
        "optimizer.param_groups[0].lr was a numpy.float64: now a number",
        "meter was a training.Meter: now a dict of its attributes",
        "best was a numpy.float32: now a number",
        "array was a numpy.ndarray: now a tensor",
        "point was a training.Point: now a list",
        "slots was a training.Slotted: left out",
        "schedule was a builtins.function: left out",
        "names was a builtins.set: now a list",
    }
    assert "training" not in sys.modules


def test_without_it_the_plain_parts_come_along_and_the_rest_is_named(folder: Path) -> None:
    convert("a.pt", "weights", "w.pt")
    assert torch.equal(load("w.pt")["w"], torch.arange(3.0))
    done = convert("a.pt", "apex", "b.pt", scale=64.0, drop=["all"])
    assert set(load("b.pt")) == {"model", "optimizer", "best", "amp"}
    assert done.dropped["meter"] == "holds training.Meter"
    assert set(done.dropped) == {"meter", "array", "point", "slots", "schedule", "names"}


def test_a_payload_runs_in_the_other_process_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs there: that is what the argument says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    name = b"cos\ngetpid\n)R"
    Path("a.pt").write_bytes(
        archive(PROTO + b"}" + op("pid") + name + b"s" + op("made") + CODE["mkdir"] + b"s.")
    )
    inspect("a.pt")
    with pytest.raises(StateError, match="holds nothing that could be converted"):
        convert("a.pt", "weights", "w.pt", drop=["all"])
    assert os.listdir() == ["a.pt"], "nothing ran unasked"
    executed = execute_pickle("a.pt")
    assert Path("MARKER").is_dir()
    assert executed.tree["pid"] != os.getpid()


def test_a_process_that_fails_or_hangs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    Path("a.pt").write_bytes(archive(PROTO + b"}" + op("x") + b"cno_such_module\nThing\n)R" + b"s."))
    with pytest.raises(CheckpointError, match=r"ended with status 1: .*no_such_module"):
        execute_pickle("a.pt")
    Path("b.pt").write_bytes(archive(PROTO + b"}" + op("x") + b"ctime\nsleep\n(K\x3ctR" + b"s."))
    with pytest.raises(CheckpointError, match=r"was not unpickled within 0.5 seconds"):
        execute_pickle("b.pt", time_limit=0.5)
    assert sorted(os.listdir()) == ["a.pt", "b.pt"]


def test_plain_data_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline.subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    done = convert(tmp_path / "a.pt", "weights", tmp_path / "b.pt", unsafe_execute_pickle=True)
    assert done.notes == ()
    folder = tmp_path / "folder"
    folder.mkdir()
    torch.save({"x": argparse.Namespace()}, folder / "scaler.pt")
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="takes one file at a time"):
        convert(folder, "weights", tmp_path / "c.pt", unsafe_execute_pickle=True)
