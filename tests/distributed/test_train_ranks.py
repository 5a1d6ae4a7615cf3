"""``halfpeak train`` on two ranks (gloo): the training of one process, stopped and continued, printed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.launching import Seen, launch
from distributed.train_ranks import CASES, COMMON, SHARED, STEPS, STOPPED, go_on, run
from halfpeak.checkpoint import file as checkpoint
from halfpeak.distributed.launched import ALONE
from halfpeak.insight.history import read_rows
from support.states import differences

CLOSE = {"O0": 2e-5, "O2": 2e-2, "O5": 2e-2}
"""Largest distance of the losses on two ranks to those of one process."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Seen:
    return launch("distributed.train_ranks", 2, folder)


def losses(path: Path) -> list[float]:
    return [row["loss"] for row in read_rows(path / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize("name", CASES)
def test_a_stopped_run_goes_on_bitwise(ranks: Seen, folder: Path, name: str) -> None:
    whole, parts = folder / f"whole {name}", folder / f"parts {name}"
    assert (whole / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    first, second = (checkpoint.load(path / "checkpoint.pt") for path in (whole, parts))
    assert set(differences(first, second)) <= {"/seconds", "/plan/output"}
    assert f"stopped after step {STOPPED} of {STEPS}, saved" in ranks[f"{name} stopped"][0]
    assert f"after step {STOPPED}" in ranks[f"{name} resumed"][0]


@pytest.mark.parametrize("name", CASES)
def test_the_first_rank_alone_prints(ranks: Seen, name: str) -> None:
    first, second = ranks[name]
    assert first.count("in 2 processes") == 1
    assert first.count("validation  step") == 2
    assert second == ""


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("pysource")])
def test_it_is_the_training_of_one_process(ranks: Seen, folder: Path, name: str, tmp_path: Path) -> None:
    """The reported loss is that of the samples of all ranks."""
    close = CLOSE[name.split()[1]]
    run(ALONE, *CASES[name], *COMMON, "--shard", "false", "--output", str(tmp_path))
    assert losses(folder / f"whole {name}") == pytest.approx(losses(tmp_path), abs=close)


@pytest.mark.parametrize(("first", "second"), SHARED)
def test_a_run_goes_on_in_the_other_kind(ranks: Seen, folder: Path, first: str, second: str) -> None:
    parts, whole = losses(folder / f"{first} then {second}"), losses(folder / f"whole {first}")
    assert parts == pytest.approx(whole, abs=CLOSE["O5"])
    assert parts[:STOPPED] == whole[:STOPPED]
    assert "note: number of processes was 2" in ranks[f"{first} then {second}"][0]


@pytest.mark.parametrize("name", ["pysource O5 copies", "pysource O5 shards"])
def test_a_run_goes_on_in_one_process(
    ranks: Seen, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    printed = go_on(ALONE, "pysource O5 copies", f"{name} then one process")
    assert "number of processes was 2" in printed
    assert losses(folder / f"{name} then one process") == pytest.approx(
        losses(folder / f"whole {name}"), abs=CLOSE["O5"]
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("not divided", "batch=17 cannot be divided among 2 processes; write a multiple of 2"),
        ("used folder", "holds a run already"),
        ("one device", "device='cpu:0' names one device, and 2 processes need one each; write 'cpu'"),
        ("no processes", "shard=True needs a process group; start the run with torchrun -m halfpeak train"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(ranks: Seen, name: str, text: str) -> None:
    for one in ranks[name]:
        assert one.startswith("ConfigError")
        assert text in one
