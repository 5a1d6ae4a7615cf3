"""RunFolder: the files in the folder of a run; choice of the folder for a new or resumed run; its ``config.toml``."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfpeak.checkpoint.temporary import write_text
from halfpeak.cli.options import AUTO, LATEST
from halfpeak.core.errors import ConfigError

RUNS = Path("runs")


class RunFolder:
    """The paths of the files in a run's folder.

    Attributes:
        checkpoint: the state from which the run continues.
        metrics: a JSON object per step.
        config: the settings in effect; ``--config`` accepts the file.
        picture: a plot of loss, loss scale and gradient norm over the steps.
        summary: the results as JSON.
        events: the folder of TensorBoard events.
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
        """Whether a run has written a checkpoint or metrics here."""
        return self.checkpoint.exists() or self.metrics.exists()


def new_folder(output: str | None, recipe: str, level: str, *, may_begin_again: bool) -> RunFolder:
    """The folder for a new run, created if it does not exist.

    Args:
        output: the path; None for ``runs/<recipe>-<level>-<time>``.
        may_begin_again: whether a folder may be used in which a run wrote metrics but no checkpoint.

    Raises:
        ConfigError: the folder holds a run already, or cannot be created.
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


def folder_to_continue(resume: str | None, output: str | None) -> RunFolder | None:
    """The folder of the run to continue; None to start a new run.

    Args:
        resume: the folder, a file in it, or None. :data:`~halfpeak.cli.options.LATEST` means ``output`` if this is
            given, else the run under ``runs`` that was saved last. :data:`~halfpeak.cli.options.AUTO` means ``output``
            if it has a checkpoint.

    Raises:
        ConfigError: there is no such run or folder, or ``output`` names another one; or it is missing with ``AUTO``, so
            that a restarted job would not find its run.
    """
    if resume is None:
        return None
    if resume == AUTO:
        if output is None:
            raise ConfigError(
                "--resume auto needs --output PATH, where a job that is started again finds its run"
            )
        folder = RunFolder(Path(output))
        return folder if folder.checkpoint.exists() else None
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
    """Write settings as TOML. Settings that are None are left out, because None is what a missing setting means.

    >>> import tempfile
    >>> from halfpeak.cli.options import read_config
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "config.toml"
    ...     write_config(file, {"level": "O2", "lr": 0.1, "plot": True, "steps": None})
    ...     read_config(file)
    {'level': 'O2', 'lr': 0.1, 'plot': True}
    """
    # JSON and TOML have the same syntax for strings, numbers and booleans.
    lines = [
        f"{name} = {json.dumps(value, allow_nan=False)}\n"
        for name, value in values.items()
        if value is not None
    ]
    write_text(path, "".join(lines))
