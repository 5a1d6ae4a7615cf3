"""Files: which ones to rewrite, and how to put a new one in the place of an old one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from halfpeak.core.errors import ConfigError

_SKIPPED: Final = frozenset(
    {"__pycache__", "build", "dist", "env", "node_modules", "site-packages", "venv", "virtualenv"}
)
"""Folders of code that is not the reader's own. Those that begin with a dot are skipped too."""


def find(paths: Sequence[Path]) -> list[Path]:
    """The Python files at and under the given paths, each once, in order.

    A file that is named is taken whatever it is called. In a folder, environments, hidden folders and links are
    skipped: what a link points at is rewritten where it lies.

    Raises:
        ConfigError: a path that does not exist, or a notebook.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(f"there is no {path}; name files or folders that exist")
        if path.suffix == ".ipynb":
            raise ConfigError(
                f"{path} is a notebook; write jupyter nbconvert --to script {path} and name the result"
            )
        for file in sorted(_under(path)) if path.is_dir() else [path]:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def replace(path: Path, content: bytes) -> None:
    """Write a file so that it is at any moment the old one or the new one, with the permissions of the old.

    A link stays a link, and what it points at is replaced.

    Raises:
        OSError: it cannot be written. The old file is intact, and nothing is left beside it.
    """
    target = path.resolve()
    mode = target.stat().st_mode
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode & 0o7777)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _under(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [one for one in folders if not _is_skipped(Path(root, one))]
        for name in files:
            path = Path(root, name)
            if path.suffix in (".py", ".pyi") and path.is_file() and not path.is_symlink():
                yield path


def _is_skipped(folder: Path) -> bool:
    own = folder.name.startswith(".") or folder.name in _SKIPPED or folder.suffix == ".egg-info"
    return own or (folder / "pyvenv.cfg").exists()
