"""The real libraries write checkpoints and read converted ones, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from halfpeak.checkpoint import inspect, load
from support.forks import python
from support.states import differences

PROGRAM = Path(__file__).with_name("library_runs.py")

pytestmark = pytest.mark.usefixtures("own_folder")


def run(
    library: str, saved: str, resumed: str, *conversions: tuple[str, str, str, list[str]]
) -> tuple[Any, Any]:
    """Train with the library to ``saved``, convert, resume from ``resumed``; return the results of both runs."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = python(str(PROGRAM), library, saved, resumed, json.dumps(conversions))
    assert done.returncode == 0, done.stderr[-3000:]
    return load("save.pt"), load("resume.pt")


def test_accelerate_goes_on_bit_for_bit() -> None:
    """accelerate continues from its folder after a conversion to an engine's state and back."""
    there, back = ("folder", "engine", "e.pt", ["random_states_0.pkl"]), ("e.pt", "accelerate", "again", [])
    end, resumed = run("accelerate", "folder", "again", there, back)
    report = inspect("folder")
    assert (report.form, report.scalers[0].scale, report.optimizers[0].steps) == ("accelerate", 128.0, 3)
    assert not differences(resumed, end)


def test_lightning_takes_up_what_was_converted() -> None:
    there, back = ("a.ckpt", "grad_scaler", "s.pt", ["loops"]), ("s.pt", "lightning", "b.ckpt", [])
    _, seen = run("lightning", "a.ckpt", "b.ckpt", there, back)
    report, state = inspect("a.ckpt"), load("s.pt")
    assert (report.form, report.epoch, report.iteration) == ("lightning", 1, 4)
    assert (report.scalers[0].where, report.scalers[0].scale) == ("MixedPrecision", 128.0)
    assert not differences(seen["weights"], dict(state["model"]))
    assert not differences(seen["scaler"], state["scaler"])
    assert not differences(seen["optimizer"]["state"], state["optimizer"]["state"])


def test_mmengine_reads_its_own_run_again() -> None:
    """mmengine 0.10.7 pickles its log, which torch refuses to read; without the log the run is plain data."""
    source = "work_save/epoch_1.pth"
    end, resumed = run("mmengine", "-", "plain.pth", (source, "mmengine", "plain.pth", ["message_hub"]))
    report = inspect(source)
    assert (report.form, report.epoch, report.iteration) == ("mmengine", 1, 4)
    assert "mmengine.logging.history_buffer.HistoryBuffer" in report.wants
    assert not differences(resumed, end)
