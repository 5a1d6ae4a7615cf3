"""Casting the tensors inside nested values: all of a container tree, or the arguments of one operation."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

Leaf: TypeAlias = Callable[[Any], Any]
"""Applied to each tensor, and to each object with a method ``to``."""


def cast_tree(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every real floating-point tensor in it cast to ``dtype``; differentiable.

    Lists, deques, tuples, named tuples, sets, mappings (``OrderedDict``, ``ModelOutput``, ``BatchEncoding``), dataclasses and
    mmengine's data elements are rebuilt in their own type; one that holds nothing to cast stays the same object. Any other
    object with a method ``to`` (a custom batch, a ``PackedSequence``) casts itself. Integer, boolean and complex tensors,
    strings, arrays, modules, generators and everything else stay as they are.

    >>> import collections, torch
    >>> Pair = collections.namedtuple("Pair", "x y")
    >>> cast_tree(Pair(torch.ones(1), torch.ones(1, dtype=torch.int64)), torch.bfloat16)
    Pair(x=tensor([1.], dtype=torch.bfloat16), y=tensor([1]))
    """
    return map_tree(value, lambda leaf: cast_leaf(leaf, dtype))


def cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    """A real floating-point tensor, or an object with a method ``to``, cast to ``dtype``; anything else as it is."""
    if isinstance(leaf, Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf
    try:
        return leaf.to(dtype)
    except TypeError:  # its ``to`` takes devices only
        return leaf


def map_tree(value: Any, leaf: Leaf) -> Any:
    """``value`` with ``leaf`` applied to every tensor, and every object with a method ``to``, in its containers.

    >>> map_tree({"x": [torch.ones(1)]}, torch.neg)
    {'x': [tensor([-1.])]}
    """
    if isinstance(value, Tensor):
        return leaf(value)
    if value is None or isinstance(value, (bool, int, float, str, bytes, bytearray, nn.Module)):
        return value
    if isinstance(value, Mapping):
        return _cast_mapping(value, leaf)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, leaf)
    if callable(getattr(value, "to", None)):
        if callable(getattr(value, "set_data", None)) and callable(getattr(value, "items", None)):
            return _cast_data_element(value, leaf)
        return value if isinstance(value, type) else leaf(value)
    if isinstance(value, MutableSequence):
        return _assign(value, enumerate(value), leaf)
    if isinstance(value, (tuple, set, frozenset)):
        return _rebuilt(value, [map_tree(item, leaf) for item in value])
    return value


def _cast_mapping(value: Mapping[Any, Any], leaf: Leaf) -> Mapping[Any, Any]:
    if isinstance(value, MutableMapping):
        return _assign(value, value.items(), leaf)
    changed = _changed(value.items(), leaf)
    # such as types.MappingProxyType
    return type(value)({**value, **changed}) if changed else value  # type: ignore[call-arg]


def _assign(value: Any, items: Iterable[tuple[Any, Any]], leaf: Leaf) -> Any:
    """A copy of ``value`` with the items that change replaced; other attributes of its class are kept."""
    changed = _changed(items, leaf)
    rebuilt = copy.copy(value) if changed else value
    for key, cast in changed.items():
        rebuilt[key] = cast
    return rebuilt


def _cast_dataclass(value: Any, leaf: Leaf) -> Any:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    changed = _changed(((name, getattr(value, name)) for name in names), leaf)
    rebuilt = copy.copy(value) if changed else value
    for name, cast in changed.items():
        object.__setattr__(rebuilt, name, cast)
    return rebuilt


def _cast_data_element(value: Any, leaf: Leaf) -> Any:
    """mmengine's ``BaseDataElement``, whose own ``to(dtype)`` would cast labels too."""
    changed = _changed(value.items(), leaf)
    if not changed:
        return value
    rebuilt = value.new()
    rebuilt.set_data(changed)
    return rebuilt


def _changed(items: Iterable[tuple[Any, Any]], leaf: Leaf) -> dict[Any, Any]:
    """The items in which :func:`map_tree` changes something, with their new values."""
    return {key: cast for key, item in items if (cast := map_tree(item, leaf)) is not item}


def _rebuilt(value: Any, items: list[Any]) -> Any:
    """A tuple, list or set with new items, in its own type; ``value`` itself if no item has changed."""
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    # A named tuple's own constructor may take other arguments; torch's return types have no _make.
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


CASTABLE: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Real floating dtypes. Complex, integer, boolean, quantised and 8-bit tensors are never cast."""

Cast = Callable[[Tensor], Tensor]


def to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in ``dtype`` if it is castable; itself if it already is in it."""
    have = tensor.dtype
    # Tensor.type takes two thirds of the time of Tensor.to, which has more to parse.
    return tensor if have is dtype or have not in CASTABLE else tensor.type(dtype)


def to_float32(tensor: Tensor) -> Tensor:
    """:func:`to` with float32."""
    return to(tensor, torch.float32)


def cast_value(value: Any, cast: Cast) -> Any:
    """``value`` with ``cast`` applied to its tensors, also those in lists, tuples and named tuples."""
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, (list, tuple)):
        return _rebuilt(value, [cast_value(item, cast) for item in value])
    return value


def tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The castable tensors among the arguments, in order."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.dtype in CASTABLE:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value, {})
