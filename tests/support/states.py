"""Where two saved states differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def differences(one: Any, other: Any) -> list[str]:
    """The paths at which two nested states are not the same to the last bit, and those that only one of them has."""
    ours, theirs = dict(_leaves(one)), dict(_leaves(other))
    return [
        path
        for path in {**ours, **theirs}
        if path not in ours or path not in theirs or not _equal(ours[path], theirs[path])
    ]


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
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and (bool(one == other) or (one != one and other != other))
