"""``History`` leaves scalars on the device until they are read, and its files survive a killed writer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from halfpeak.core.errors import ConfigError
from halfpeak.insight import history as history_module
from halfpeak.insight.history import History, JsonLines, Row, TensorBoard, read_rows


class Collect:
    def __init__(self) -> None:
        self.batches: list[list[Row]] = []
        self.closed = False

    def write(self, rows: Sequence[Row]) -> None:
        self.batches.append(list(rows))

    def close(self) -> None:
        self.closed = True


def test_rows_come_in_batches_and_in_order() -> None:
    sink = Collect()
    history = History([sink], every=3)
    for step in range(1, 8):
        history.record({"step": step}, {"loss": torch.tensor(float(step)), "scale": torch.tensor(2.0**step)})
    assert [[row["step"] for row in batch] for batch in sink.batches] == [[1, 2, 3], [4, 5, 6]]
    history.close()
    assert [row["loss"] for batch in sink.batches for row in batch] == [1, 2, 3, 4, 5, 6, 7]
    assert sink.batches[-1] == [{"step": 7, "loss": 7.0, "scale": 128.0}]
    assert sink.closed


def test_rows_of_different_names_may_be_mixed() -> None:
    history = History(every=100)
    history.record({"step": 1}, {"loss": torch.tensor(0.5)})
    history.record({"step": 1, "note": "x"}, {})
    history.record({"step": 2}, {"accuracy": torch.tensor(0.25), "loss": torch.tensor(1.0)})
    assert history.read() == [
        {"step": 1, "loss": 0.5},
        {"step": 1, "note": "x"},
        {"step": 2, "accuracy": 0.25, "loss": 1.0},
    ]
    assert history.read() == []


def test_a_scalar_that_is_reused_afterwards_keeps_its_recorded_value() -> None:
    history = History(every=100)
    scale = torch.tensor(4.0)
    history.record({"step": 1}, {"scale": scale})
    scale.mul_(2)
    history.record({"step": 2}, {"scale": scale})
    assert [row["scale"] for row in history.read()] == [4.0, 8.0]


def test_recording_reads_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(every=100)
    reads: list[str] = []
    for name in ("item", "tolist", "__float__", "__bool__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: reads.append(name) or 0)
    history.record({"step": 1}, {"loss": torch.ones(()), "scale": torch.ones(())})
    assert reads == []


class Slow:
    """An ``AsyncCopy`` that is ready when the test sets ``is_there``."""

    made: ClassVar[list[Slow]] = []

    def __init__(self, vector: torch.Tensor) -> None:
        self.vector, self.is_there, self.waited = vector, False, False
        self.made.append(self)

    def is_ready(self) -> bool:
        return self.is_there

    def read(self) -> torch.Tensor:
        self.waited = not self.is_there
        return self.vector


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[Slow]:
    monkeypatch.setattr(history_module, "AsyncCopy", Slow)
    monkeypatch.setattr(Slow, "made", [])
    return Slow.made


def test_rows_come_when_they_have_arrived_and_nobody_waits_for_them(slow: list[Slow]) -> None:
    sink = Collect()
    history = History([sink])
    for step in range(1, 4):
        assert history.record({"step": step}, {"loss": torch.tensor(float(step))}) == []
    slow[1].is_there = True
    assert history.record({"step": 4}, {"loss": torch.tensor(4.0)}) == [], "the first are not there yet"
    slow[0].is_there = True
    arrived = history.record({"step": 5}, {"loss": torch.tensor(5.0)})
    assert arrived == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]
    assert sink.batches == [arrived]
    assert not any(copy.waited for copy in slow)


def test_reading_waits_for_all_that_is_left(slow: list[Slow]) -> None:
    history = History(every=2)
    for step in range(1, 4):
        history.record({"step": step}, {"loss": torch.tensor(float(step))})
    assert [row["loss"] for row in history.read()] == [1.0, 2.0, 3.0]
    assert [copy.waited for copy in slow] == [True, True]
    assert history.read() == []


def test_every_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="every=0"):
        History(every=0)


def test_json_lines_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write([{"step": 1, "loss": float("inf"), "norm": float("nan"), "scale": 2.0}])
    sink.close()
    (line,) = path.read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "norm": None,
        "scale": 2.0,
    }


def test_a_resumed_file_forgets_later_steps_and_an_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    sink = JsonLines(path, after=2)
    sink.write([{"step": 3, "loss": 0.5}])
    sink.close()
    assert read_rows(path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 0.5}]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path)
    sink.write([{"step": 1, "loss": 0.5, "text": "x", "missing": None}, {"step": 2, "loss": 0.25}])
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
