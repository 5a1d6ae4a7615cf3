"""From the names of :mod:`halfpeak.casting.oplists` to the functions of the installed torch, and back."""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from typing import Any

import torch
from torch.overrides import get_testing_overrides, resolve_name

from halfpeak.casting.oplists import Rows


def functions(rows: Rows) -> list[Any]:
    """The functions that ``rows`` name, without those that this torch lacks.

    >>> functions((("torch", "mm no_such_name"), ("torch.Tensor", "data.__get__")))
    [<built-in method mm ...>, <method-wrapper '__get__' ...>]
    """
    found = [function_at(f"{path}.{name}") for path, names in rows for name in names.split()]
    return [function for function in found if function is not None]


def function_at(path: str) -> Any:
    """What ``path`` names, or None if this torch lacks it.

    >>> function_at("torch.Tensor.add_") is torch.Tensor.add_
    True
    """
    owner, names = ("torch.Tensor", path[13:]) if path.startswith("torch.Tensor.") else path.rsplit(".", 1)
    found: Any = torch.Tensor if owner == "torch.Tensor" else importlib.import_module(owner)
    for name in names.split("."):
        found = getattr(found, name, None)
    return found


def announced_path(function: Any) -> str | None:
    """The path under which torch announces calls of ``function``, or None if it does not.

    >>> announced_path(torch.nn.functional.linear)
    'torch.nn.functional.linear'
    >>> announced_path(len) is None
    True
    """
    known = isinstance(function, Hashable) and function in get_testing_overrides()
    return resolve_name(function) if known else None
