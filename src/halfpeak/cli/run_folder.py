"""The folder of a run: where its files are, which folder a new or a resumed run gets, and its ``config.toml``."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfpeak.checkpoint.temporary import write_text
from halfpeak.cli.options import LATEST
from halfpeak.core.errors import ConfigError

RUNS = Path("runs")


class RunFolder:
    """A folder, and the files in it.

    Attributes:
        checkpoint: everything that continues the run.
        metrics: a JSON object per step.
        config: the settings as used; ``--config`` takes the file.
        picture: loss, scale and gradient norm over the steps.
        summary: what came out, as JSON.
        events: TensorBoard's folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint.pt"
        self.metrics = path / "metrics.jsonl"
        self.config = path / "config.toml"
        self.picture = path / "history.png"
        self.summary = path / "summary.json"
        self.events = path / "tensorboard"

    def holds_run(self) -> bool:
        """Whether a run has written here."""
        return self.checkpoint.exists() or self.metrics.exists()


def new_folder(output: str | None, recipe: str, level: str, *, may_begin_again: bool = False) -> RunFolder:
    """A folder for a new run, made if need be.

    Args:
        output: where; None for a name of its own under ``runs``.
        recipe: part of such a name.
        level: likewise.
        may_begin_again: take a folder in which a run has written nothing to continue from.

    Raises:
        ConfigError: there is a run in it already, or it cannot be made.
    """
    if output is None:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{recipe}-{level}-{stamp}"
        candidates = (RUNS / (name if i == 1 else f"{name}-{i}") for i in range(1, 1000))
        path = next(path for path in candidates if not path.exists())
    else:
        path = Path(output)
    folder = RunFolder(path)
    if folder.checkpoint.exists() or (folder.holds_run() and not may_begin_again):
        raise ConfigError(
            f"{path} holds a run already; write --resume {path} to continue it, or another --output"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the output folder {path} cannot be made: {error.strerror}") from None
    return folder


def folder_to_continue(output: str | None) -> RunFolder | None:
    """What ``--resume auto`` goes on with: the folder ``output`` where it has a checkpoint; None to begin a run there.

    Raises:
        ConfigError: no ``output``: a job that is started again would not find its run.
    """
    if output is None:
        raise ConfigError(
            "--resume auto needs --output PATH, where a job that is started again finds its run"
        )
    folder = RunFolder(Path(output))
    return folder if folder.checkpoint.exists() else None


def existing_folder(resume: str, output: str | None) -> RunFolder:
    """The folder of the run to continue.

    Args:
        resume: the folder, a file in it, or :data:`~halfpeak.cli.options.LATEST`: ``output`` if it is given, else the
            run under ``runs`` that was saved last.

    Raises:
        ConfigError: there is no run there.
    """
    if resume == LATEST and output is not None:
        resume = output
    if resume == LATEST:
        runs = [folder for folder in map(RunFolder, RUNS.glob("*")) if folder.checkpoint.exists()]
        if not runs:
            raise ConfigError(f"there is no run under {RUNS.resolve()}; write --resume PATH")
        return max(runs, key=lambda folder: folder.checkpoint.stat().st_mtime_ns)
    path = Path(resume)
    folder = RunFolder(path.parent if path.is_file() else path)
    if output is not None and Path(output).resolve() != folder.path.resolve():
        raise ConfigError(f"a resumed run stays in its folder {folder.path}; leave --output {output} out")
    if not folder.path.is_dir():
        raise ConfigError(f"there is no folder {folder.path} to resume from")
    return folder


def write_config(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain settings as TOML; those that are None are left out, which means the same.

    >>> import tempfile
    >>> from halfpeak.cli.options import read_config
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "config.toml"
    ...     write_config(file, {"level": "O2", "lr": 0.1, "plot": True, "steps": None})
    ...     read_config(file)
    {'level': 'O2', 'lr': 0.1, 'plot': True}
    """
    # JSON and TOML spell strings, numbers and booleans alike.
    lines = [
        f"{name} = {json.dumps(value, allow_nan=False)}\n"
        for name, value in values.items()
        if value is not None
    ]
    write_text(path, "".join(lines))
