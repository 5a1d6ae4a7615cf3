"""Checks of the values of a state dict. No function here changes its arguments, so a refusal has changed nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from halfpeak.core.errors import StateError
from halfpeak.core.short_repr import short_repr

ENGINE_VERSION: Final = 3
"""The version of an engine's state that is read and written. Version 1 was never released."""


def require_mapping(value: object, what: str, keys: Collection[str] | None = None) -> Mapping[Any, Any]:
    """``value`` as a dict; with ``keys``, one that has these and no others.

    Raises:
        StateError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise StateError(f"{what} must be a dict, not {short_repr(value)}; pass what state_dict() gave")
    if keys is not None and set(value) != set(keys):
        missing = [short_repr(key) for key in keys if key not in value]
        unknown = [short_repr(key) for key in value if key not in keys]
        raise StateError(
            f"{what} does not fit: missing are {', '.join(missing[:8]) or 'none'}, unknown {', '.join(unknown[:8]) or 'none'}; "
            "pass what state_dict() gave"
        )
    return value


def require_list(value: object, what: str, length: int | None = None) -> Sequence[Any]:
    """``value`` as a list or tuple, of ``length`` if given.

    Raises:
        StateError: it is something else.
    """
    if not isinstance(value, (list, tuple)):
        raise StateError(f"the {what} of the state must be a list, not {short_repr(value)}")
    if length is not None and len(value) != length:
        raise StateError(f"the state has {len(value)} {what}, expected {length}")
    return value


def require_count(value: object, what: str, least: int = 0) -> int:
    """``value`` as an integer from ``least`` to 2**31 - 2, from which an int32 counter can go on.

    Raises:
        StateError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31 - 1:
        raise StateError(f"{what} must be an integer from {least} to 2**31 - 2, not {short_repr(value)}")
    return value


def require_number(value: object, what: str, *, least: float = -math.inf) -> float:
    """``value``, a number or a tensor of one element, as a float that is not NaN and at least ``least``.

    Raises:
        StateError: it is something else.
    """
    number = math.nan
    if isinstance(value, Tensor):
        if has_memory(value) and value.numel() == 1 and not value.is_complex():
            number = float(value)
    elif is_float_sized(value):
        number = float(value)
    if not number >= least:
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise StateError(f"{what} must be a number{bound}, not {_shown(value)}")
    return number


def require_tensor(
    value: object, what: str, *, like: Tensor | None = None, shape: tuple[int, ...] | None = None
) -> Tensor:
    """``value`` as a tensor that can be copied into another.

    Args:
        what: the name of the value, for the message.
        like: a tensor whose shape and kind of number (floating, complex, neither) the value must have.
        shape: without ``like``, the required shape; the value must be floating-point.

    Raises:
        StateError: it is something else, or has no dense memory: sparse, quantized, nested, on the meta device.
    """
    if not isinstance(value, Tensor):
        raise StateError(f"{what} is {short_repr(value)} in the state and should be a tensor")
    if not has_memory(value):
        raise StateError(f"{what} is {_shown(value)} in the state and should be a dense tensor")
    shape = tuple(like.shape) if like is not None else shape
    if shape is not None and tuple(value.shape) != shape:
        raise StateError(f"{what} is {tuple(value.shape)} in the state and should be {shape}")
    is_floating = like is None or like.is_floating_point()
    is_complex = like is not None and like.is_complex()
    if (value.is_floating_point(), value.is_complex()) != (is_floating, is_complex):
        expected = "floating-point numbers" if like is None else str(like.dtype)
        raise StateError(f"{what} is {value.dtype} in the state and should be {expected}")
    return value


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


def _shown(value: object) -> str:
    if not isinstance(value, Tensor) or has_memory(value):
        return f"{value.item()}" if isinstance(value, Tensor) and value.numel() == 1 else short_repr(value)
    kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
    return f"{short_repr(value)} ({kind}, {value.device})"
