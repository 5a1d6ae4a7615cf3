"""The runners do what mmcv 1.7.2 did on the same script; every difference is written down here.

``make oracle`` checks the record against mmcv itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfpeak import runner
from runner.oracle import runner_cases as cases

RECORD = json.loads((Path(__file__).parent / "oracle" / "runner.json").read_text())


@pytest.mark.parametrize(
    ("which", "name"),
    [*(("lr", name) for name in cases.LR), *(("momentum", name) for name in cases.MOMENTUM)],
)
def test_schedules(which: str, name: str) -> None:
    config = {"lr": cases.LR, "momentum": cases.MOMENTUM}[which][name]
    found = cases.curve(runner, config, which)
    assert found == pytest.approx(RECORD[which][name], rel=1e-12, abs=0)
    assert len(found) == cases.EPOCHS * cases.BATCHES


@pytest.mark.parametrize("name", cases.WORKFLOWS)
def test_stages(name: str) -> None:
    """By iterations there are two more stages: hooks see the run as one epoch, and the epoch is the current batch's."""
    kind, workflow = cases.WORKFLOWS[name]
    found, expected = cases.stages(runner, kind, workflow), RECORD["stages"][name]
    if kind == "IterBasedRunner":
        assert [found[1][0], found[-2][0]] == ["before_train_epoch", "after_train_epoch"]
        found = [found[0], *found[2:-2], found[-1]]
        assert [row[1] for row in found if row[0] == "before_train_iter"] == [
            iteration // cases.BATCHES for iteration in range(cases.EPOCHS * cases.BATCHES)
        ]
        assert found.pop()[0] == expected.pop()[0] == "after_run"
        found, expected = ([[row[0], *row[2:]] for row in rows] for rows in (found, expected))
    assert found == expected


@pytest.mark.parametrize("kind", RECORD["training"])
def test_training(kind: str) -> None:
    """Weights and norms agree but for what another processor rounds, averages within 1e-5: another formula computes them."""
    found, expected = cases.training(runner, kind), RECORD["training"][kind]
    assert found["order"] == expected["order"]
    for name in ("weights", "norms"):
        assert len(found[name]) == len(expected[name])
        for ours, theirs in zip(found[name], expected[name], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    assert len(found["swapped"]) == len(expected["swapped"])
    for ours, theirs in zip(found["swapped"], expected["swapped"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", cases.LOGS)
def test_logs(name: str) -> None:
    """Text and JSON agree, except for the epoch of IterBasedRunner, which mmcv updated one iteration late."""
    found, expected = cases.logs(runner, *cases.LOGS[name]), RECORD["logs"][name]
    assert found["text"] == expected["text"]
    if cases.LOGS[name][0] == "IterBasedRunner":
        found["json"], expected = without_epoch(found["json"]), {"json": without_epoch(expected["json"])}
    assert found["json"] == expected["json"]


def without_epoch(rows: list[Any]) -> list[Any]:
    return [[pair for pair in row if pair[0] != "epoch"] for row in rows]


@pytest.mark.parametrize("name", cases.CHECKPOINTS)
def test_checkpoints(name: str) -> None:
    """The same files, with more entries. mmcv's IterBasedRunner wrote one iteration fewer than it had finished."""
    found, expected = cases.checkpoints(runner, *cases.CHECKPOINTS[name]), dict(RECORD["checkpoints"][name])
    assert found.pop("keys") == sorted([*expected.pop("keys"), "hooks", "loop", "random"])
    assert sorted([*found.pop("meta"), "mmcv_version"]) == sorted({*expected.pop("meta"), "hook_msgs"})
    if cases.CHECKPOINTS[name][0] == "IterBasedRunner":
        expected = {
            **expected,
            "counters": {
                file: [number // cases.BATCHES, number + 1]
                for file, (_, number) in expected["counters"].items()
            },
        }
    assert found == expected


def test_hook_info() -> None:
    """The same hooks at the same stages, except that mmcv's logger copied its files after the run."""
    made = cases.make(runner)
    made.register_training_hooks(
        {"policy": "step", "step": [1]},
        {},
        {"interval": 1},
        {"interval": 10, "hooks": [{"type": "TextLoggerHook"}]},
        {"policy": "cyclic"},
    )
    found, expected = by_stage(made.get_hook_info()), by_stage(RECORD["hook info"])
    assert expected.pop("after_run") == ["(VERY_LOW    ) TextLoggerHook"]
    assert found == expected


def by_stage(info: str) -> dict[str, list[str]]:
    stages: dict[str, list[str]] = {}
    for line in (line.strip() for line in info.splitlines()):
        if line.endswith(":"):
            stages[line[:-1]] = []
        elif line.startswith("("):
            stages[list(stages)[-1]].append(line)
    return stages
