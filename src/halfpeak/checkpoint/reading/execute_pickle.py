"""Runs what is in a pickle. Never imported: :mod:`halfpeak.checkpoint.reading.offline` starts it as a process of its own."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from halfpeak.checkpoint.file import save
from halfpeak.checkpoint.plain import MAX_DEPTH, plain
from halfpeak.core.errors import CheckpointError

MEMORY_LIMIT: Final = 4
"""Times the size of the file, plus what torch itself needs."""


def main(source: str, target: str) -> None:
    """Unpickle ``source`` with its code, and save what is plain data in it to ``target``."""
    _limit_memory(source)
    tree = torch.load(source, map_location="cpu", weights_only=False)
    changed: dict[str, str] = {}
    save(target, {"tree": _simplify(tree, "", changed, 0), "changed": changed}, keep_previous=False)


def _simplify(value: Any, where: str, changed: dict[str, str], depth: int) -> Any:
    """``value`` as plain data. What had to become something else, or nothing, is noted by its path."""
    kind = type(value)
    if depth == MAX_DEPTH:
        changed[where] = f"a {kind.__qualname__}, nested too deep: left out"
        return None
    if kind is dict or kind is OrderedDict:
        return _simplify_dict(value, where, changed, depth)
    if kind is list or kind is tuple:
        return kind(_simplify(one, f"{where}[{i}]", changed, depth + 1) for i, one in enumerate(value))
    try:
        return plain(value)
    except CheckpointError:
        return _convert(value, where, changed, depth)


def _simplify_dict(value: Any, where: str, changed: dict[str, str], depth: int) -> Any:
    result = OrderedDict[Any, Any]() if type(value) is OrderedDict else {}
    for key, one in value.items():
        plain_key = key if type(key) in (str, int, float, bool) else str(key)
        result[plain_key] = _simplify(one, f"{where}.{key}" if where else str(key), changed, depth + 1)
    return result


def _convert(value: Any, where: str, changed: dict[str, str], depth: int) -> Any:
    """An object as the data in it, if there is a plain way to see it."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        changed[where] = f"a {name}: now a tensor"
        return value.detach().as_subclass(torch.Tensor).clone()
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a NumPy scalar
        changed[where] = f"a {name}: now a number"
        return _simplify(value.item(), where, changed, depth + 1)
    if hasattr(value, "__array__") and value.dtype.kind in "biuf":
        changed[where] = f"a {name}: now a tensor"
        return torch.as_tensor(value).clone()
    if isinstance(value, Mapping):
        changed[where] = f"a {name}: now a dict"
        return _simplify_dict(value, where, changed, depth)
    if isinstance(value, (list, tuple, set, frozenset)):
        changed[where] = f"a {name}: now a list"
        return [_simplify(one, f"{where}[{i}]", changed, depth + 1) for i, one in enumerate(value)]
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        changed[where] = f"a {name}: now a dict of its attributes"
        return _simplify(dict(vars(value)), where, changed, depth + 1)
    changed[where] = f"a {name}: left out"
    return None


def _limit_memory(source: str) -> None:
    """Keep a file that lies about its sizes from taking the machine down, where the system can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    ceiling = os.path.getsize(source) * MEMORY_LIMIT + 64 * 2**30
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or ceiling < hard:
        resource.setrlimit(resource.RLIMIT_AS, (ceiling, hard))


if __name__ == "__main__":
    main(str(Path(sys.argv[1])), sys.argv[2])
