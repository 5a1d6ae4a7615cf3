"""Compare tensors bit for bit; send a saved state through a file, change one entry of it, list differences of two."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from support.snapshot import raw


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    """Whether tensors are equal to the bit. Asserts that both sides have the same number of them, and not zero."""
    ours, theirs = list(one), list(other)
    assert len(ours) == len(theirs) > 0
    return all(map(torch.equal, ours, theirs))


def through_a_file(state: Any, *, weights_only: bool = True) -> Any:
    """Save a state and load it again; it must be plain data, unless ``weights_only`` is False."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    """A function that sets the entry at a path of keys to ``value``, or to ``value(old entry)`` if it is callable."""

    def change(state: Any) -> None:
        holder = _at(state, path)
        holder[path[-1]] = value(holder[path[-1]]) if callable(value) else value

    return change


def drop(*path: Any) -> Callable[[Any], None]:
    """A function that removes the entry at a path of keys."""

    def change(state: Any) -> None:
        del _at(state, path)[path[-1]]

    return change


def _at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        state = state[key]
    return state


def differences(one: Any, other: Any) -> list[str]:
    """The paths at which two nested states differ in a bit, and those that only one of them has."""
    ours, theirs = dict(_leaves(one)), dict(_leaves(other))
    return [
        path
        for path in {**ours, **theirs}
        if path not in ours or path not in theirs or not _equal(ours[path], theirs[path])
    ]


def identical(one: Any, other: Any) -> bool:
    """Whether two nested states agree in types, the order of keys, and values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    return bool(one == other)


def _leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict | list | tuple):
        inner = state.items() if isinstance(state, dict) else enumerate(state)
        for key, part in inner:
            yield from _leaves(part, f"{path}/{key}")
        yield path, len(state)
    else:
        yield path, state


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # torch.equal does not find a NaN equal to itself.
        return one.dtype == other.dtype and (
            torch.equal(one, other) or (one.shape == other.shape and raw(one) == raw(other))
        )
    return type(one) is type(other) and (bool(one == other) or (one != one and other != other))
