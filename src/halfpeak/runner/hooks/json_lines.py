"""JSON lines: one object per line, each line in the file as soon as it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add one line. Floats are rounded to five places; what JSON has no form for is written as text.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.json"
    >>> append(path, {"mode": "train", "loss": 0.1234567})
    >>> path.read_text()
    '{"mode": "train", "loss": 0.12346}\\n'
    """
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(_rounded(row), default=_as_plain) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def _as_plain(value: Any) -> Any:
    return _rounded(value.item()) if hasattr(value, "item") else str(value)
