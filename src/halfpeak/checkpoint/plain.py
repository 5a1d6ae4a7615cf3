"""Plain data: the closed set of values that a checkpoint may hold."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import torch
from torch import Tensor

from halfpeak.core.errors import CheckpointError

SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
MAX_DEPTH: Final = 100
# torch.load(weights_only=True) cannot read longer integers, and cannot read b"" at all.
MAX_INT_BITS: Final = 2000

_ALLOWED: Final = "tensors, None, bool, int, float, str, bytes, and dict, OrderedDict, list or tuple of these"
_OPEN: Final = object()


def plain(value: Any, where: str = "state") -> Any:
    """A copy of nested containers that is checked to hold plain data only.

    The copy has new containers, and detached tensors that share storage with the originals. So it has no Python
    attributes and no autograd graph, and a ``Parameter`` becomes a tensor. An object that occurs twice is still one
    object in the copy. An ``OrderedDict`` keeps the ``_metadata`` attribute of ``Module.state_dict``.

    Subclasses of the allowed types (a namedtuple, an enum, a NumPy scalar, a DTensor) are refused, because the file
    would name their class and ``weights_only=True`` could not read it back.

    Args:
        where: the name of the root in error messages.

    Raises:
        CheckpointError: a value has another type. The message has the path of keys that leads to it.

    >>> plain({"step": 3, "lr": [0.1, None]})
    {'step': 3, 'lr': [0.1, None]}
    >>> plain({"model": {"hook": print}})
    Traceback (most recent call last):
    ...
    halfpeak.core.errors.CheckpointError: state['model']['hook'] is a builtin_function_or_method; a checkpoint ...
    """
    return _copy(value, where, 0, {})


def _copy(value: Any, where: str, depth: int, seen: dict[int, Any]) -> Any:
    kind: type[Any] = type(value)
    if kind in SCALARS:
        return _check_scalar(value, where)
    if id(value) in seen:
        if seen[id(value)] is _OPEN:
            raise CheckpointError(f"{where} contains itself", "checkpoints cannot hold reference cycles")
        return seen[id(value)]
    if depth == MAX_DEPTH:
        raise CheckpointError(f"{where[:200]}... is nested more than {MAX_DEPTH} levels deep")
    seen[id(value)] = _OPEN
    if kind is Tensor or kind is torch.nn.Parameter:
        if value.is_meta:
            raise CheckpointError(
                f"{where} is a meta tensor, which has no values", "give it a device with to_empty() first"
            )
        copy = value.detach()
    elif kind is list or kind is tuple:
        copy = kind(_copy(item, f"{where}[{i}]", depth + 1, seen) for i, item in enumerate(value))
    elif kind is dict or kind is OrderedDict:
        copy = kind(
            (_check_key(key, where), _copy(item, f"{where}[{key!r}]", depth + 1, seen))
            # Not value.items(), because a file can set an attribute called `items` on an OrderedDict.
            for key, item in kind.items(value)
        )
        if kind is OrderedDict and "_metadata" in vars(value):
            vars(copy)["_metadata"] = _copy(vars(value)["_metadata"], f"{where}._metadata", depth + 1, seen)
    else:
        raise CheckpointError(f"{where} is a {kind.__qualname__}", f"a checkpoint holds {_ALLOWED}")
    seen[id(value)] = copy
    return copy


def _check_scalar(value: Any, where: str) -> Any:
    if type(value) is int and value.bit_length() > MAX_INT_BITS:
        raise CheckpointError(
            f"{where} is an integer of {value.bit_length()} bits, and torch reads back at most {MAX_INT_BITS}",
            "write a str",
        )
    if value == b"":
        raise CheckpointError(f"{where} is b'', which torch cannot read back as plain data", "write None")
    return value


def _check_key(key: Any, where: str) -> Any:
    if type(key) not in SCALARS:
        raise CheckpointError(
            f"{where} has a key of type {type(key).__qualname__}",
            "keys are None, bool, int, float, str or bytes",
        )
    return _check_scalar(key, f"a key of {where}")
