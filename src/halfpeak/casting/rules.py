"""What each list of :mod:`halfpeak.casting.oplists` means.

A rule gets the scope, the function and its arguments, and runs the function. A call with ``out=`` runs as written: the
caller has chosen a dtype and a place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from halfpeak.casting.cache import WeightCache
from halfpeak.casting.composites import BODIES
from halfpeak.casting.walk import Cast, cast_arguments, cast_value, tensors, to, to_float32
from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import BannedOpError

Function = Callable[..., Any]


class Casting(TorchFunctionMode):
    """What a rule knows of a scope: where it casts to, and that it can be put on the stack again."""

    dtype: torch.dtype
    cache: WeightCache | None


Rule = Callable[[Casting, Function, tuple[Any, ...], dict[str, Any]], Any]

_Parameter: Final = nn.Parameter
_FLOAT32: Final = torch.float32
_UP_TO_FLOAT32: Final = LOW | {torch.float32}


def low(scope: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast floating arguments to the low dtype, weights through the cache."""
    dtype = scope.dtype
    if is_dynamo_compiling():  # a trace shares what it can by itself
        return _run(func, args, kwargs, lambda tensor: to(tensor, dtype))
    cache = scope.cache

    def cast(tensor: Tensor) -> Tensor:
        # The exact class: what a subclass stores, or does when it is cast, is its own affair.
        if type(tensor) is _Parameter and cache is not None and tensor.dtype is _FLOAT32:
            return cache.cast(tensor)
        return to(tensor, dtype)

    if kwargs:
        return _run(func, args, kwargs, cast)
    # Most arguments are tensors or None: those are told here, without a function call each.
    return func(
        *[
            cast(arg) if isinstance(arg, Tensor) else arg if arg is None else cast_value(arg, cast)
            for arg in args
        ]
    )


def float32(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast floating arguments to float32."""
    return _run(func, args, kwargs, to_float32)


def widen(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast low arguments to float32."""
    return _run(func, args, kwargs, _low_to_float32)


def promote(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast low arguments to float32 where dtypes up to float32 are mixed; any other mix is torch's own affair."""
    if len(args) == 2 and not kwargs:  # `x + y`, by far the commonest call, without building sets
        first, second = args
        if not isinstance(second, Tensor) or (isinstance(first, Tensor) and first.dtype is second.dtype):
            return func(first, second)
    dtypes = {tensor.dtype for tensor in tensors(args, kwargs)}
    if len(dtypes) > 1 and dtypes <= _UP_TO_FLOAT32:
        return _run(func, args, kwargs, to_float32)
    return func(*args, **kwargs)


def match_self(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast the other floating arguments to the dtype of the tensor that is written to."""
    dtype = args[0].dtype if args and isinstance(args[0], Tensor) else None
    if dtype not in _UP_TO_FLOAT32:
        return func(*args, **kwargs)
    return _run(func, args, kwargs, lambda tensor: to(tensor, dtype))


def banned_in_place(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse a low tensor to write to; cast the other floating arguments to float32."""
    if args and isinstance(args[0], Tensor) and args[0].dtype in LOW:
        name = func.__name__
        raise BannedOpError(
            f"{name} on a {args[0].dtype} tensor: {name[:-1]} computes in float32 here, and a low tensor cannot hold "
            f"the result. Write x = x.{name[:-1]}(...) without the underscore, or call it inside disable_casts()"
        )
    others, kwargs = cast_arguments(args[1:], kwargs, to_float32)
    return func(*args[:1], *others, **kwargs)


def banned(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse any low argument."""
    dtype = next((tensor.dtype for tensor in tensors(args, kwargs) if tensor.dtype in LOW), None)
    if dtype is not None:
        raise BannedOpError(
            f"{func.__name__} on a {dtype} tensor: its gradient can reach 1e12, more than float16 can hold. Best remove "
            "the sigmoid before it and use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss. Or have the "
            "sigmoid return float32: register_float_function(torch, 'sigmoid'). Or pass allow_banned=True to compute "
            "this loss in float32"
        )
    return func(*args, **kwargs)


def composite(scope: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that is written in Python with the scope in force for the calls it makes."""
    with scope:
        return BODIES[func.__qualname__](*args, **kwargs)


def escape(scope: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run as written, and share no more casts of a weight whose memory is handed out."""
    if not is_dynamo_compiling() and scope.cache is not None:
        for weight in _weights(args[:1], kwargs):
            scope.cache.escape(weight)
    return func(*args, **kwargs)


def overwrite(scope: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run as written, and forget the casts of the weights that are written to."""
    if not is_dynamo_compiling() and scope.cache is not None:
        for weight in _weights(args[:1], kwargs):
            scope.cache.drop(weight)
    return func(*args, **kwargs)


def as_function(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the function of torch in place of the method of the same name."""
    return getattr(torch, func.__name__)(*args, **kwargs)


RULES: Final[dict[str, Rule]] = {
    "low": low,
    "float32": float32,
    "widen": widen,
    "promote": promote,
    "match_self": match_self,
    "banned_in_place": banned_in_place,
    "banned": banned,
    "composite": composite,
    "escape": escape,
    "overwrite": overwrite,
    "as_function": as_function,
}
"""Every rule by its name."""


def _weights(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Parameter]:
    return [tensor for tensor in tensors(args, kwargs) if isinstance(tensor, nn.Parameter)]


def _low_to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW else tensor


def _run(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], cast: Cast) -> Any:
    if not kwargs:
        return func(*[cast_value(arg, cast) for arg in args])
    if kwargs.get("out") is not None:
        return func(*args, **kwargs)
    cast_args, cast_kwargs = cast_arguments(args, kwargs, cast)
    return func(*cast_args, **cast_kwargs)
