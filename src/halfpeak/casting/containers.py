"""Casting every tensor inside a nested value while every container keeps its type."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Leaf: TypeAlias = Callable[[Any], Any]
"""What becomes of a tensor, or of an object with a method ``to``."""


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

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        return _ask(leaf, dtype)

    return map_tree(value, cast)


def map_tree(value: Any, leaf: Leaf) -> Any:
    """``value`` with ``leaf`` applied to every tensor, and every object with a method ``to``, in its containers.

    >>> map_tree({"x": [torch.ones(1)]}, torch.neg)
    {'x': [tensor([-1.])]}
    """
    if isinstance(value, Tensor):
        return leaf(value)
    if value is None or isinstance(value, (bool, int, float, str, bytes, bytearray, nn.Module, torch.Size)):
        return value
    if callable(getattr(value, "to", None)):
        return value if isinstance(value, type) else leaf(value)
    if isinstance(value, Mapping):
        return _cast_mapping(value, leaf)
    if isinstance(value, MutableSequence):
        return _assign(value, enumerate(value), leaf)
    if isinstance(value, (tuple, set, frozenset)):
        return _rebuild(value, leaf)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, leaf)
    return value


def _cast_mapping(value: Mapping[Any, Any], leaf: Leaf) -> Mapping[Any, Any]:
    if isinstance(value, MutableMapping):
        return _assign(value, value.items(), leaf)
    cast = map_tree(dict(value), leaf)
    if all(cast[key] is item for key, item in value.items()):
        return value
    return type(value)(cast)  # type: ignore[call-arg]  # such as types.MappingProxyType


def _assign(value: Any, items: Iterable[tuple[Any, Any]], leaf: Leaf) -> Any:
    """A copy of ``value`` in which the items that change are replaced, whatever else its class keeps in it."""
    changed = [(key, cast) for key, item in items if (cast := map_tree(item, leaf)) is not item]
    if not changed:
        return value
    rebuilt = copy.copy(value)
    for key, cast in changed:
        rebuilt[key] = cast
    return rebuilt


def _rebuild(value: Any, leaf: Leaf) -> Any:
    items = list(value)
    cast = [map_tree(item, leaf) for item in items]
    if all(new is old for new, old in zip(cast, items, strict=True)):
        return value
    # A named tuple's own constructor may take other arguments; torch's return types have no _make.
    return value._make(cast) if hasattr(value, "_make") else type(value)(cast)


def _cast_dataclass(value: Any, leaf: Leaf) -> Any:
    held = (
        (field.name, getattr(value, field.name))
        for field in dataclasses.fields(value)
        if hasattr(value, field.name)
    )
    changed = [(name, cast) for name, item in held if (cast := map_tree(item, leaf)) is not item]
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
