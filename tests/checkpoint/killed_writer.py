"""Program that kills children while they save: at the first and last run of each line, and at random moments.

It is a program of its own, because forking a process that has threads is not safe. It fails if a file is not as promised.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import halfpeak.checkpoint
from halfpeak.checkpoint import load, previous_path, save

TRACED = tuple(
    os.path.join(os.path.dirname(halfpeak.checkpoint.__file__), name) for name in ("file.py", "temporary.py")
)


def state(step: int, size: int = 64) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((size,), float(step)), "list": [step] * 3}


def check(path: Path, steps: set[int]) -> int:
    loaded = load(path)
    step = loaded["step"]
    assert step in steps, f"loaded step {step}, expected one of {sorted(steps)[:3]}..."
    assert torch.equal(loaded["weights"], torch.full_like(loaded["weights"], float(step)))
    assert loaded["list"] == [step] * 3
    return step


def stale(directory: Path) -> int:
    return sum(path.name.endswith(".halfpeak-tmp") for path in directory.iterdir())


def check_clean(path: Path) -> None:
    for one in path.parent.iterdir():
        if one.name.endswith(".halfpeak-tmp"):
            os.utime(one, (0, 0))  # as after a day
    save(path, state(999))
    assert {entry.name for entry in path.parent.iterdir()} <= {path.name, previous_path(path).name}
    assert load(path)["step"] == 999


def save_traced(path: Path, reached: Callable[[tuple[str, int]], None]) -> None:
    """Save, and call ``reached((file, line))`` before every line of the traced files runs."""

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            reached((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    save(path, state(2))
    sys.settrace(None)


def chosen_events(path: Path) -> list[int]:
    """Number the line events of a save, and return those that are the first or the last of their line."""
    save(path, state(0))
    save(path, state(1))
    events: list[tuple[str, int]] = []
    save_traced(path, events.append)
    first = {where: number for number, where in reversed(list(enumerate(events)))}
    last = {where: number for number, where in enumerate(events)}
    return sorted({*first.values(), *last.values()})


def kill_at_event(path: Path, event: int) -> None:
    child = os.fork()
    if child == 0:
        numbers = iter(range(event + 1))

        def reached(where: tuple[str, int]) -> None:
            if next(numbers) == event:
                os.kill(os.getpid(), signal.SIGKILL)

        save_traced(path, reached)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


def kill_at_every_line(directory: Path) -> tuple[int, int, set[int]]:
    left_behind, seen = 0, set[int]()
    events = chosen_events(directory / "whole.pt")
    for event in events:
        path = directory / f"{event}" / "last.pt"
        path.parent.mkdir()
        save(path, state(0))
        save(path, state(1))
        kill_at_event(path, event)
        seen.add(check(path, {1, 2}))
        if previous_path(path).exists():
            check(previous_path(path), {0, 1})
        left_behind += stale(path.parent)
        check_clean(path)
    return len(events), left_behind, seen


def kill_at_random(path: Path, kills: int) -> None:
    rng = random.Random(5)
    for _ in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            step = 0
            while True:
                step += 1
                save(path, state(step, size=100_000))
                os.write(writer, b".")
        os.read(reader, 1)
        select.select([], [], [], rng.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(writer)
        done = 1
        while chunk := os.read(reader, 4096):
            done += len(chunk)
        os.close(reader)
        check(path, {done, done + 1})
        check_clean(path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as scratch:
        lines, left_behind, seen = kill_at_every_line(Path(scratch))
    assert lines > 60, f"only {lines} lines were traced"
    assert left_behind > 10, f"only {left_behind} killed writers left a file to clean up"
    assert seen == {1, 2}, f"only step {seen} was ever found"
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as scratch:
        kill_at_random(Path(scratch) / "last.pt", kills=10)
    print(f"killed at {lines} lines and 10 random moments; {left_behind} stale files cleaned")
