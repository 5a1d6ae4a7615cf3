"""JSON that every parser reads: numbers that are not finite, which JSON cannot represent, become null."""

from __future__ import annotations

import json
import math
from typing import Any


def finite_json(value: Any, *, indent: int | None = None) -> str:
    """A value as JSON and a newline, with null in the place of numbers that are not finite.

    >>> finite_json({"loss": [0.5, float("nan")]})
    '{"loss": [0.5, null]}\\n'
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
