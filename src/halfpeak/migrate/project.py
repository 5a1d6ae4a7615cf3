"""Project: several files at once, and which of them must keep sharing one state of amp."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from halfpeak.migrate.findings import Finding, Target
from halfpeak.migrate.rewrite import Rewritten, is_guest, rewrite, unreadable


class Migrated(NamedTuple):
    """One file: its old content, and what became of it."""

    path: Path
    old: bytes
    result: Rewritten


def migrate(paths: Sequence[Path], to: Target) -> Iterator[Migrated]:
    """Rewrite files, without writing them.

    An engine replaces the state that ``amp`` keeps for the process. So where one file initialises amp and another one
    trains with it, and one of the two imports the other, both stay on ``halfpeak.amp``.
    """
    sources: dict[Path, bytes] = {}
    for path in paths:
        try:
            sources[path] = path.read_bytes()
        except OSError as error:
            yield Migrated(path, b"", unreadable(b"", 1, str(error.strerror)))
    held = _held(sources) if to == "halfpeak" else {}
    for path, source in sources.items():
        result = rewrite(source, to, keep_amp=path in held)
        if path in held and result.source != source:
            reason = f"{held[path]} trains with the amp that is initialised here"
            finding = Finding(1, "the file", f"it stays on halfpeak.amp: {reason}", "rewrite both by hand")
            result = Rewritten(result.source, (finding, *result.findings), result.unreadable)
        yield Migrated(path, source, result)


def _held(sources: Mapping[Path, bytes]) -> dict[Path, Path]:
    """Files that share amp with another file, and which one."""
    imported = {path: _imported(source) for path, source in sources.items()}
    guests = [path for path, source in sources.items() if is_guest(source)]
    held: dict[Path, Path] = {}
    for guest in guests:
        for path, names in imported.items():
            if path not in guests and (guest.stem in names or path.stem in imported[guest]):
                held[path] = guest
    return held


def _imported(source: bytes) -> set[str]:
    """The parts of all names in the import statements of a file."""
    lines = (line.split() for line in source.decode("utf-8", "replace").splitlines())
    found = [words[1:] for words in lines if words[:1] in (["import"], ["from"])]
    return set(re.findall(r"\w+", " ".join(word for words in found for word in words)))
