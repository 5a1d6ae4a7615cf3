"""Configuration files: TOML, YAML or JSON, read as data and nothing else; written as TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from halfpeak.core.errors import ConfigError
from halfpeak.insight.extras import needs
from halfpeak.recipes.plan import check


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a file, under their own types.

    Raises:
        ConfigError: the file is missing, of another kind, broken, or holds something else than settings.
        MissingExtraError: the file is YAML and pyyaml is not installed.
    """
    readers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".json": json.loads,
        ".yaml": _read_yaml,
        ".yml": _read_yaml,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"config {str(path)!r} must end in {', '.join(readers)}")
    try:
        values = reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config {str(path)!r} is not valid {path.suffix[1:].upper()}: {reason}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"config {str(path)!r} must be a table of settings, such as level = 'O2'")
    try:
        return check({str(name): value for name, value in values.items()})
    except ConfigError as error:
        raise type(error)(f"config {str(path)!r}: {error}") from None


def write_config(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain settings as TOML; those that are None are left out, which means the same.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "config.toml"
    ...     write_config(file, {"level": "O2", "lr": 0.1, "plot": True, "steps": None})
    ...     read_config(file)
    {'level': 'O2', 'lr': 0.1, 'plot': True}
    """
    # JSON and TOML spell strings, numbers and booleans alike.
    lines = [
        f"{name} = {json.dumps(value, allow_nan=False)}\n"
        for name, value in values.items()
        if value is not None
    ]
    path.write_text("".join(lines), encoding="utf-8")


def _read_yaml(text: str) -> Any:
    with needs("cli"):
        import yaml
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
