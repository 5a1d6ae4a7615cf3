"""Checks of a saved state, by a schema, before it is loaded. No function here changes its arguments."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType, UnionType
from typing import Any, Final, TypeAlias, TypeGuard, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from halfpeak.core.errors import StateError
from halfpeak.core.short_repr import name_list, short_repr

ENGINE_VERSION: Final = 3
"""The version of an engine's state that is read and written. Version 1 was never released."""

_DEEPEST: Final = 16
_REMEDY: Final = "pass what state_dict() gave in a run that was built like this one"

Check: TypeAlias = Callable[[Any, str], Any]
Schema: TypeAlias = (
    "Mapping[Any, Schema] | Sequence[Schema] | type | UnionType | Tensor | NotRequired | EllipsisType | Check"
)
"""What a value of a state must be; see :func:`require`."""


@dataclass(frozen=True, slots=True)
class NotRequired:
    """The schema of an entry that a dict may lack, as ``typing.NotRequired`` says it of a ``TypedDict``."""

    schema: Schema


def require(value: Any, what: str, schema: Schema) -> Any:
    """``value``, if it fits a schema.

    ::

        {"a": schema}           a dict with these keys and no others
        {"a": x, str: schema}   and any others that are strings; with object, any others
        [schema, schema]        a list or tuple of this length
        [schema, ...]           a list or tuple of any length
        int | None              a value of one of these types; True and False are of bool alone
        a tensor                a dense tensor of the same shape and kind of number
        a function              a value for which function(value, what) does not raise StateError
        ...                     anything

    Args:
        what: the value as an expression, for the message.

    >>> require({"step": 3, "sizes": [1, -2]}, "state", {"step": int, "sizes": [require_count, ...]})
    Traceback (most recent call last):
        ...
    halfpeak.core.errors.StateError: state['sizes'][1] is -2 and should be an integer from 0 to 2**31 - 2; pass ...

    Raises:
        StateError: it does not fit.
    """
    if isinstance(schema, NotRequired):
        require(value, what, schema.schema)
    elif isinstance(schema, Tensor):
        require_tensor(value, what, like=schema)
    elif isinstance(schema, Mapping):
        _require_keys(require_mapping(value, what), what, schema)
        others = next((part for key, part in schema.items() if isinstance(key, type)), ...)
        for key, part in value.items():
            require(part, f"{what}[{short_repr(key)}]", schema.get(key, others))
    elif isinstance(schema, Sequence):
        any_length = len(schema) == 2 and schema[1] is ...
        if not isinstance(value, (list, tuple)) or not (any_length or len(value) == len(schema)):
            raise unfit(value, what, "a list" if any_length else f"a list of {len(schema)}")
        for i, part in enumerate(value):
            require(part, f"{what}[{i}]", schema[0 if any_length else i])
    elif isinstance(schema, (type, UnionType)):
        types = get_args(schema) or (schema,)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise unfit(value, what, str(schema) if isinstance(schema, UnionType) else schema.__name__)
    elif schema is not ...:
        schema(value, what)
    return value


def _require_keys(value: Mapping[Any, Any], what: str, schema: Mapping[Any, Schema]) -> None:
    types = tuple(key for key in schema if isinstance(key, type))
    needed = (key for key, part in schema.items() if not (key in types or isinstance(part, NotRequired)))
    missing = [short_repr(key) for key in needed if key not in value]
    # True and 1.0 are equal to the key 1.
    unknown = [
        short_repr(key)
        for key in value
        if not isinstance(key, types) and (key not in schema or isinstance(key, (bool, float, type)))
    ]
    if missing or unknown:
        raise StateError(
            f"{what} does not fit: missing are {name_list(missing) or 'none'}, unknown {name_list(unknown) or 'none'}; "
            f"{_REMEDY}"
        )


def unfit(value: object, what: str, allowed: str) -> StateError:
    """The error for a value of a state that is not one of those that are allowed."""
    return StateError(f"{what} is {_shown(value)} and should be {allowed}; {_REMEDY}")


def require_mapping(value: object, what: str) -> Mapping[Any, Any]:
    """``value``; raises StateError if it is no dict."""
    if not isinstance(value, Mapping):
        raise unfit(value, what, "a dict")
    return value


def require_count(value: object, what: str, least: int = 0) -> int:
    """``value``; raises StateError if it is no integer from ``least`` to 2**31 - 2, from which an int32 counter can go on."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31 - 1:
        raise unfit(value, what, f"an integer from {least} to 2**31 - 2")
    return value


def require_number(value: object, what: str, *, least: float = -math.inf) -> float:
    """``value`` as a float; raises StateError if it is no number or tensor of one element, NaN, or below ``least``."""
    number = math.nan
    if isinstance(value, Tensor):
        if has_memory(value) and value.numel() == 1 and not value.is_complex():
            number = float(value)
    elif is_float_sized(value):
        number = float(value)
    if not number >= least:
        raise unfit(value, what, "a number" if least == -math.inf else f"a number of at least {least:g}")
    return number


def require_tensor(value: object, what: str, *, like: Tensor | None = None) -> Tensor:
    """``value``; raises StateError if it is no tensor that can be copied into ``like``, or without ``like`` into any other.

    It must have the shape and the kind of number (floating, complex, neither) of ``like``, and dense memory: not sparse,
    quantized, nested or on the meta device.
    """
    if (
        isinstance(value, Tensor)
        and has_memory(value)
        and (like is None or (value.shape == like.shape and _kind(value) == _kind(like)))
    ):
        return value
    kind = "tensor" if like is None else f"{_kind(like)} tensor of {tuple(like.shape)}"
    raise unfit(value, what, f"a dense {kind}")


def require_plain(value: object, what: str, *, any_leaf: bool = False) -> None:
    """Raise StateError if a value holds more than numbers and tensors that a step can write in place.

    No container may be in it twice, because torch walks through each as often as it occurs. With ``any_leaf`` it may hold
    other values, too, as a parameter group, which torch only copies.
    """
    waiting: list[tuple[object, int]] = [(value, 0)]
    seen: set[int] = set()
    while waiting:
        one, depth = waiting.pop()
        if isinstance(one, Tensor):
            if _shares_memory(one) or (one.requires_grad and not one.is_leaf):
                raise unfit(one, what, "a dense, detached tensor whose elements share no memory")
        # torch makes a container of the same class from a generator, which a named tuple does not take.
        elif isinstance(one, (dict, list, tuple)) and (any_leaf or not hasattr(one, "_fields")):
            if id(one) in seen or depth == _DEEPEST:
                raise unfit(
                    value,
                    what,
                    f"of at most {_DEEPEST} levels of dicts and lists, none of which is in it twice",
                )
            seen.add(id(one))
            waiting.extend((part, depth + 1) for part in (one.values() if isinstance(one, dict) else one))
        elif not (any_leaf or one is None or isinstance(one, (bool, int, float))):
            raise unfit(one, what, "a number or a tensor")


def _shares_memory(value: Tensor) -> bool:
    """Whether elements have no address of their own, so that a step could not write them in place."""
    span, shared = 1, not has_memory(value)
    for stride, size in [] if shared else sorted(zip(value.stride(), value.shape, strict=True)):
        shared = shared or (size > 1 and stride < span)
        span += stride * (size - 1)
    return shared


def has_memory(value: Tensor) -> bool:
    """Whether a tensor has memory with an address for each element."""
    return (
        value.layout is torch.strided
        and not value.is_nested
        and not value.is_quantized
        and value.device.type != "meta"
    )


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_float_sized(value: object) -> TypeGuard[int | float]:
    """Whether a value is a float, or an integer that a float can hold."""
    return isinstance(value, float) or (is_number(value) and abs(value) < 2**63)


def copied(state: Any, what: str) -> Any:
    """A copy of a state that shares no tensor with it.

    Raises:
        StateError: it cannot be copied: it is nested too deeply, or holds a tensor that is part of a graph.
    """
    try:
        try:
            return copy.deepcopy(state)
        # torchao's low-bit moments can be flattened, but not cloned, nor can a shard that is a view into a larger buffer.
        except RuntimeError:
            return copy.deepcopy(state, {id(one): _put_together(one) for one in _wrappers_in(state)})
    except Exception as error:
        raise StateError(f"{what} cannot be copied: {str(error)[:200]}; pass plain data") from error


def _wrappers_in(state: object) -> Iterator[Any]:
    """The wrapper subclasses among a state's tensors, which consist of other tensors."""
    if isinstance(state, (dict, list, tuple)):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _wrappers_in(part)
    elif is_traceable_wrapper_subclass(state):
        yield state


def _put_together(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):  # the mesh of a shard
        return tensor
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.clone()
    names, context = tensor.__tensor_flatten__()
    parts = {name: _put_together(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())


def _kind(value: Tensor) -> str:
    return "floating-point" if value.is_floating_point() else "complex" if value.is_complex() else "integer"


def _shown(value: object) -> str:
    if not isinstance(value, Tensor) or has_memory(value):
        return f"{value.item()}" if isinstance(value, Tensor) and value.numel() == 1 else short_repr(value)
    kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
    return f"{short_repr(value)} ({kind}, {value.device})"
