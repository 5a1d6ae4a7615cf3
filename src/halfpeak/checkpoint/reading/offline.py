"""The explicit way to read a file that is not plain data: in a process of its own, which may run what is in the file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from halfpeak.checkpoint.file import StrPath, load
from halfpeak.core.errors import CheckpointError

MODULE: Final = "halfpeak.checkpoint.reading.execute_pickle"
TIME_LIMIT: Final = 600.0


@dataclass(frozen=True)
class Executed:
    """What came out: plain data, and by its path each object that had to be turned into data or left out."""

    tree: Any
    changed: dict[str, str]


def execute_pickle(path: StrPath, *, time_limit: float = TIME_LIMIT) -> Executed:
    """Unpickle a file in another process, **which runs whatever code the file holds**, and take plain data from it.

    That process has the rights of this one: only its time and its memory are bounded. Do this with files that you made
    yourself, or whose author you trust with your machine. It finds the classes in the file where this process finds
    modules: in the working directory and on ``PYTHONPATH``.

    Raises:
        CheckpointError: the other process failed or took too long, with what it said last.
    """
    with tempfile.TemporaryDirectory(prefix="halfpeak-") as folder:
        result = Path(folder) / "plain.pt"
        command = [sys.executable, "-W", "ignore", "-m", MODULE, str(Path(path).resolve()), str(result)]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=time_limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CheckpointError(f"{path} was not unpickled within {time_limit:g} seconds") from None
        if done.returncode != 0 or not result.exists():
            said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
            raise CheckpointError(
                f"the process that unpickled {path} ended with status {done.returncode}: {said[-1][:300]!r}"
            )
        found = load(result)
    return Executed(found["tree"], found["changed"])
