"""States that an earlier halfpeak saved still load, and the run then continues bit for bit as the original run did.

The files in ``saved_before`` hold every level, every storage of the fused optimizers' state, every kind of open window,
and states of the front ends. ``saved_before/make.py`` wrote them and describes each run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.saved_before.make import CASES, HERE, RUNNERS, STOP, TOTAL, digest, probe
from halfpeak import checkpoint

EXPECTED = json.loads((HERE / "expected.json").read_text())


@pytest.fixture(scope="module")
def same_processor() -> bool:
    """Whether torch rounds here as on the machine that wrote the files."""
    return probe() == EXPECTED["probe"]


def check(name: str, numbers: list[float], run: Any, *, exactly: bool) -> None:
    expected = [float.fromhex(number) for number in EXPECTED[name]["numbers"]]
    if exactly:
        assert numbers == expected
        assert digest(run) == EXPECTED[name]["digest"]
    else:
        assert numbers == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("name", CASES)
def test_an_earlier_state_loads_and_the_run_goes_on(name: str, same_processor: bool, tmp_path: Path) -> None:
    """Load the old file, then the file that today's code saves after that load."""
    for seed, file in ((1, HERE / f"{name}.pt"), (2, tmp_path / "today.pt")):
        run = CASES[name](seed)
        run.load(checkpoint.load(file))
        checkpoint.save(tmp_path / "today.pt", run.state(), keep_previous=False)
        numbers = [number for i in range(STOP, TOTAL) for number in run.train(i)]
        check(name, numbers, run, exactly=same_processor)


@pytest.mark.parametrize("name", RUNNERS)
def test_a_runner_resumes_from_an_earlier_file(name: str, same_processor: bool) -> None:
    run = RUNNERS[name](1)
    run.runner.resume(HERE / f"{name}.pth")
    check(name, run.run(), run, exactly=same_processor)


def test_every_file_is_read() -> None:
    files = {path.stem for path in HERE.iterdir() if path.suffix in (".pt", ".pth")}
    assert files == {*CASES, *RUNNERS} == set(EXPECTED) - {"halfpeak", "torch", "probe"}
