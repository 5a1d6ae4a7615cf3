"""Where a checkpoint goes: the directory, and the number in the name."""

from __future__ import annotations

from pathlib import Path

from halfpeak.core.errors import ConfigError
from halfpeak.runner.checkpoint import StrPath


def target(out_dir: StrPath, filename_tmpl: str, number: int) -> Path:
    """The file that a template such as ``"epoch_{}.pth"`` names; its directory is made.

    Raises:
        ConfigError: the template does not take one number.
    """
    try:
        name = filename_tmpl.format(number)
    except (AttributeError, IndexError, KeyError, ValueError):
        raise ConfigError(
            f"filename_tmpl={filename_tmpl!r} must have one place for the number; write filename_tmpl='epoch_{{}}.pth'"
        ) from None
    directory = Path(out_dir)
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name


def directory(out_dir: StrPath | None, work_dir: str | None, owner: str) -> str:
    """Where a hook saves: the work directory, or one of the same name inside ``out_dir``.

    Raises:
        ConfigError: there is neither.

    >>> directory(None, "runs/a", "CheckpointHook"), directory("store", "runs/a", "CheckpointHook")
    ('runs/a', 'store/a')
    """
    if out_dir is None:
        if work_dir is None:
            raise ConfigError(
                f"{owner} has no place to save; give the runner work_dir=..., or the hook out_dir=..."
            )
        return work_dir
    if work_dir is None or Path(out_dir) == Path(work_dir):
        return str(out_dir)
    return str(Path(out_dir) / Path(work_dir).name)
