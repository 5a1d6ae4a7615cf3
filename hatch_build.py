"""The long description of the package: README.md as an index can show it, which has no files beside it to link to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK_TO_FILE = re.compile(r"!?\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


class Readme(MetadataHookInterface):
    """Writes links to files of the repository as their text."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the long description."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": LINK_TO_FILE.sub(r"\1", text)}
