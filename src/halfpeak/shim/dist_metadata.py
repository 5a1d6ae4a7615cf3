"""The distribution of a shim's packages, for ``importlib.metadata`` and ``pkg_resources``."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from halfpeak.shim.spec import Shim, Undo


class ShimDistribution(Distribution):
    """A distribution with a name, a version and top-level modules. It lists no files: those belong to halfpeak.

    Its place is the file of the shim's table, not a folder. Libraries put the place of a distribution on ``sys.path``, and
    nothing must be imported from there.
    """

    def __init__(self, shim: Shim) -> None:
        self._shim = shim

    def read_text(self, filename: str) -> str | None:
        """The text of ``METADATA`` or ``top_level.txt``; None for any other file."""
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {self._shim.distribution}\nVersion: {self._shim.version}\n"
            "Summary: stands in for it while halfpeak.shim is installed\n",
            "top_level.txt": "".join(f"{name}\n" for name in self._shim.packages),
        }
        return texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """A path below the file of the table."""
        return Path(self._shim.table) / path


def add_to_working_set(pkg_resources: ModuleType, shim: Shim) -> Undo:
    """Add the distribution to ``pkg_resources``, which reads only installed files, unless it knows a real one."""
    working_set: Any = getattr(pkg_resources, "working_set", None)
    if working_set is None or normalized(shim.distribution) in working_set.by_key:
        return lambda: None
    ours: Any = pkg_resources.Distribution(
        location=shim.table, project_name=shim.distribution, version=shim.version
    )
    working_set.add(ours)

    def undo() -> None:
        if working_set.by_key.get(ours.key) is ours:
            del working_set.by_key[ours.key]
            working_set.entry_keys[ours.location].remove(ours.key)
            if not working_set.entry_keys[ours.location]:
                del working_set.entry_keys[ours.location]
                working_set.entries.remove(ours.location)
            # require() has put it there.
            sys.path[:] = [entry for entry in sys.path if entry != ours.location]

    return undo


def normalized(name: str) -> str:
    """The normalized name of a distribution (PEP 503); equal for equivalent names."""
    return re.sub(r"[-_.]+", "-", name).lower()
