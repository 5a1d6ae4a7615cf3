"""Projects: finds the files to rewrite, detects files that share amp's state, and replaces files on disk."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from halfpeak.checkpoint.temporary import replacing
from halfpeak.core.errors import ConfigError
from halfpeak.migrate.findings import Finding, Target
from halfpeak.migrate.rewrite import Rewritten, names_of_amp, rewrite, unreadable

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
    """Rewrite files in memory; nothing is written.

    ``amp`` keeps its state per process, and an engine does not share it. So if one file initialises amp, another file
    trains with it, and one of the two imports the other, both stay on ``halfpeak.amp``. A file that cannot be read does
    not stop the others.
    """
    sources: dict[Path, bytes] = {}
    for path in paths:
        try:
            if path.is_file():
                sources[path] = path.read_bytes()
            else:
                yield Migrated(path, b"", unreadable(b"", 1, "it is not a regular file"))
        except OSError as error:
            yield Migrated(path, b"", unreadable(b"", 1, str(error.strerror)))
    shared = _shared_amp(sources) if to == "halfpeak" else {}
    for path, source in sources.items():
        result = rewrite(source, to, keep_amp=path in shared)
        if path in shared and result.source != source:
            reason = f"{shared[path]} trains with the amp that is initialised here"
            finding = Finding(1, "the file", f"it stays on halfpeak.amp: {reason}", "rewrite both by hand")
            result = Rewritten(result.source, (finding, *result.findings), result.unreadable)
        yield Migrated(path, source, result)


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


def _shared_amp(sources: Mapping[Path, bytes]) -> dict[Path, Path]:
    """The files that initialise amp for another file: they import, or are imported by, one that uses it without.

    Returns:
        The other file by the file that initialises amp.
    """
    imported = {path: _imported(source) for path, source in sources.items()}
    used = {path: names_of_amp(source) for path, source in sources.items()}
    found: dict[Path, Path] = {}
    for user in (path for path, names in used.items() if names and "initialize" not in names):
        for path, names in imported.items():
            if "initialize" in used[path] and (user.stem in names or path.stem in imported[user]):
                found[path] = user
    return found


def _imported(source: bytes) -> set[str]:
    """Every word in the import statements of a file, the parts of dotted names separately."""
    words: set[str] = set()
    in_parentheses = is_continued = False
    for line in source.decode("utf-8", "replace").splitlines():
        code = line.partition("#")[0].rstrip()
        if is_continued or code.split()[:1] in (["import"], ["from"]):
            words.update(re.findall(r"\w+", code))
            in_parentheses = (in_parentheses or "(" in code) and ")" not in code
            is_continued = in_parentheses or code.endswith("\\")
    return words
