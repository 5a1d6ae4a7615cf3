"""What the package says of itself on an index: README.md as its long description, and the addresses of its repository."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK_TO_FILE = re.compile(r"!?\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


class Metadata(MetadataHookInterface):
    """Fills in the fields that pyproject.toml calls dynamic, except for the version."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the long description and the addresses."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": description(text)}
        metadata["urls"] = addresses()


def description(readme: str) -> str:
    """README.md without the links to files, which an index does not have: their text alone stays."""
    return LINK_TO_FILE.sub(r"\1", readme)


def addresses() -> dict[str, str]:
    """Pages of the repository that a workflow builds the package in; none elsewhere, where nothing says its address."""
    repository = os.environ.get("GITHUB_REPOSITORY")
    if not repository:
        return {}
    home = f"{os.environ['GITHUB_SERVER_URL']}/{repository}"
    return {
        "Repository": home,
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Issues": f"{home}/issues",
        "Security": f"{home}/security/advisories/new",
    }
