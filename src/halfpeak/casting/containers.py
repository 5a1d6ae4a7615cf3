"""Casting every tensor inside a nested value while every container keeps its type."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence
from typing import Any

import torch
from torch import Tensor, nn


def cast_tree(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every real floating-point tensor in it cast to ``dtype``; differentiable.

    Lists, deques, tuples, named tuples, sets, dicts and their subclasses (``OrderedDict``, ``ModelOutput``), and
    dataclasses are rebuilt in their own type; one that holds nothing to cast stays the same object. An object with a
    method ``to`` (a custom batch, a ``PackedSequence``) is asked to cast itself. Integer, boolean and complex tensors,
    strings, arrays, modules, generators and everything else pass through.

    >>> import collections, torch
    >>> Pair = collections.namedtuple("Pair", "x y")
    >>> cast_tree(Pair(torch.ones(1), torch.ones(1, dtype=torch.int64)), torch.bfloat16)
    Pair(x=tensor([1.], dtype=torch.bfloat16), y=tensor([1]))
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if value is None or isinstance(value, (bool, int, float, str, bytes, bytearray, nn.Module, torch.Size)):
        return value
    if callable(getattr(value, "to", None)):
        return value if isinstance(value, type) else _ask(value, dtype)
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype)
    if isinstance(value, MutableSequence):
        return _assign(value, enumerate(value), dtype)
    if isinstance(value, (tuple, set, frozenset)):
        return _rebuild(value, dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, dtype)
    return value


def _cast_mapping(value: Mapping[Any, Any], dtype: torch.dtype) -> Mapping[Any, Any]:
    if isinstance(value, MutableMapping):
        return _assign(value, value.items(), dtype)
    cast = cast_tree(dict(value), dtype)
    if all(cast[key] is item for key, item in value.items()):
        return value
    return type(value)(cast)  # type: ignore[call-arg]  # such as types.MappingProxyType


def _assign(value: Any, items: Iterable[tuple[Any, Any]], dtype: torch.dtype) -> Any:
    """A copy of ``value`` in which the items that change are replaced, whatever else its class keeps in it."""
    changed = [(key, cast) for key, item in items if (cast := cast_tree(item, dtype)) is not item]
    if not changed:
        return value
    rebuilt = copy.copy(value)
    for key, cast in changed:
        rebuilt[key] = cast
    return rebuilt


def _rebuild(value: Any, dtype: torch.dtype) -> Any:
    items = list(value)
    cast = [cast_tree(item, dtype) for item in items]
    if all(new is old for new, old in zip(cast, items, strict=True)):
        return value
    # A named tuple's own constructor may take other arguments; torch's return types have no _make.
    return value._make(cast) if hasattr(value, "_make") else type(value)(cast)


def _cast_dataclass(value: Any, dtype: torch.dtype) -> Any:
    held = (
        (field.name, getattr(value, field.name))
        for field in dataclasses.fields(value)
        if hasattr(value, field.name)
    )
    changed = [(name, cast) for name, item in held if (cast := cast_tree(item, dtype)) is not item]
    if not changed:
        return value
    rebuilt = copy.copy(value)
    for name, cast in changed:
        object.__setattr__(rebuilt, name, cast)
    return rebuilt


def _ask(value: Any, dtype: torch.dtype) -> Any:
    """Let an object cast itself; one whose ``to`` knows devices only is left as it is."""
    try:
        return value.to(dtype)
    except TypeError:
        return value
