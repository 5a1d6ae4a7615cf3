"""Projects: finds the files to rewrite, rewrites them in memory, and replaces files on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from halfpeak.checkpoint.temporary import replacing
from halfpeak.core.errors import ConfigError
from halfpeak.migrate.findings import Target
from halfpeak.migrate.rewrite import Rewritten, rewrite, unreadable

_SKIPPED: Final = frozenset(
    {"__pycache__", "build", "dist", "env", "node_modules", "site-packages", "venv", "virtualenv"}
)
"""Folders of installed or generated code, which are skipped; so are folders whose names begin with a dot."""


class Migrated(NamedTuple):
    """One file: its old content, and the result."""

    path: Path
    old: bytes
    result: Rewritten


def find(paths: Sequence[Path]) -> list[Path]:
    """The Python files at and under the given paths, each once, in order.

    A path to a file is taken whatever its suffix is. In a folder, virtual environments, hidden folders and symbolic
    links are skipped; the target of a link is rewritten only if it is under a given path itself.

    Raises:
        ConfigError: a path does not exist, or is a notebook.
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


def migrate(paths: Sequence[Path], to: Target) -> Iterator[Migrated]:
    """Rewrite files in memory; nothing is written. A file that cannot be read does not stop the others."""
    for path in paths:
        try:
            source = path.read_bytes() if path.is_file() else None
        except OSError as error:
            yield Migrated(path, b"", unreadable(b"", 1, str(error.strerror)))
            continue
        if source is None:
            yield Migrated(path, b"", unreadable(b"", 1, "it is not a regular file"))
        else:
            yield Migrated(path, source, rewrite(source, to))


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically and keep its permissions. A symbolic link stays, and its target is replaced.

    Raises:
        OSError: the file cannot be written. The old file is intact, and no temporary file is left.
    """
    target = path.resolve()
    mode = target.stat().st_mode
    with replacing(target) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.chmod(file.name, mode & 0o7777)


def _under(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [one for one in folders if not _is_skipped(Path(root, one))]
        for name in files:
            path = Path(root, name)
            if path.suffix in (".py", ".pyi") and path.is_file() and not path.is_symlink():
                yield path


def _is_skipped(folder: Path) -> bool:
    skipped = folder.name.startswith(".") or folder.name in _SKIPPED or folder.suffix == ".egg-info"
    return skipped or (folder / "pyvenv.cfg").exists()
