"""ShimDistribution: what ``importlib.metadata`` says of a package that comes from a shim."""

from __future__ import annotations

import os
import re
from importlib.metadata import Distribution
from pathlib import Path

from halfpeak.shim.description import ROOT, Shim


class ShimDistribution(Distribution):
    """Name, version and top-level modules. It lists no files: they are halfpeak's."""

    def __init__(self, shim: Shim) -> None:
        self._shim = shim

    def read_text(self, filename: str) -> str | None:
        """The two files that a distribution of this kind has; None for others."""
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {self._shim.distribution}\nVersion: {self._shim.version}\n"
            "Summary: stands in for it while halfpeak.shim is installed\n",
            "top_level.txt": "".join(f"{name}\n" for name in self._shim.packages),
        }
        return texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """A path beside the trees."""
        return ROOT / path


def normalized(name: str) -> str:
    """Names of distributions are the same if these are (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
