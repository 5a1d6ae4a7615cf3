"""From the names of :mod:`halfpeak.casting.oplists` to the functions of the installed torch."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from halfpeak.casting.oplists import Rows


def functions(rows: Rows) -> list[Any]:
    """The functions that ``rows`` name, without those that this torch lacks.

    >>> functions((("torch", "mm no_such_name"), ("torch.Tensor", "data.__get__")))
    [<built-in method mm ...>, <method-wrapper '__get__' ...>]
    """
    found = [_resolve(_owner(path), name) for path, names in rows for name in names.split()]
    return [function for function in found if function is not None]


def _owner(path: str) -> Any:
    return torch.Tensor if path == "torch.Tensor" else importlib.import_module(path)


def _resolve(owner: Any, name: str) -> Any:
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner
