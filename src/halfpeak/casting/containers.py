"""Casting every tensor inside a nested value while every container keeps its type."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def cast_tree(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every real floating-point tensor in it cast to ``dtype``; differentiable.

    Lists, tuples, named tuples, sets, dicts and their subclasses (``OrderedDict``, ``ModelOutput``), and dataclasses
    are rebuilt in their own type. An object with a method ``to`` (a custom batch, a ``PackedSequence``) is asked to
    cast itself. Integer, boolean and complex tensors, strings, arrays, modules, generators and everything else pass
    through.

    >>> import collections, torch
    >>> Pair = collections.namedtuple("Pair", "x y")
    >>> cast_tree(Pair(torch.ones(1), torch.ones(1, dtype=torch.int64)), torch.bfloat16)
    Pair(x=tensor([1.], dtype=torch.bfloat16), y=tensor([1]))
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if value is None or isinstance(value, (bool, int, float, str, bytes, nn.Module, torch.Size)):
        return value
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype)
    if isinstance(value, tuple) and hasattr(value, "_fields") and not hasattr(value, "to"):
        return type(value)(*(cast_tree(item, dtype) for item in value))
    if isinstance(value, (list, tuple, set, frozenset)) and not hasattr(value, "to"):
        return type(value)([cast_tree(item, dtype) for item in value])
    return _cast_object(value, dtype)


def _cast_mapping(value: Mapping[Any, Any], dtype: torch.dtype) -> Mapping[Any, Any]:
    if type(value) is dict:
        return {key: cast_tree(item, dtype) for key, item in value.items()}
    if hasattr(value, "to"):  # such as transformers' BatchEncoding
        return _ask(value, dtype)
    rebuilt: Any = copy.copy(value)
    for key, item in value.items():
        rebuilt[key] = cast_tree(item, dtype)
    return rebuilt


def _cast_object(value: Any, dtype: torch.dtype) -> Any:
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return _ask(value, dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rebuilt = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(rebuilt, field.name, cast_tree(getattr(value, field.name), dtype))
        return rebuilt
    return value


def _ask(value: Any, dtype: torch.dtype) -> Any:
    """Let an object cast itself; one whose ``to`` knows devices only is left as it is."""
    try:
        return value.to(dtype)
    except TypeError:
        return value
