"""One rule for each list of :mod:`halfpeak.casting.oplists`.

A rule takes the scope, the function and its arguments, casts the arguments and calls the function. A call with ``out=``
runs as written, because the caller has chosen the dtype of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from halfpeak.casting.torch_functions import COMPOSITE_BODIES
from halfpeak.casting.tree import Cast, cast_value, tensors, to, to_float32
from halfpeak.casting.weight_casts import WeightCache
from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import BannedOpError

Function = Callable[..., Any]


class Casting(TorchFunctionMode):
    """The part of a scope that rules use: its low dtype, its weight cache, and the function mode itself."""

    dtype: torch.dtype
    cache: WeightCache | None


Rule = Callable[[Casting, Function, tuple[Any, ...], dict[str, Any]], Any]

_Parameter: Final = nn.Parameter
_FLOAT32: Final = torch.float32
_UP_TO_FLOAT32: Final = LOW | {torch.float32}


def low(scope: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast floating arguments to the low dtype, weights through the cache."""
    dtype = scope.dtype
    # The compiler removes repeated casts itself.
    cache = None if is_dynamo_compiling() else scope.cache

    def cast(tensor: Tensor) -> Tensor:
        # The exact class: a subclass may store something else, or cast in its own way.
        if type(tensor) is _Parameter and cache is not None and tensor.dtype is _FLOAT32:
            return cache.cast(tensor)
        return to(tensor, dtype)

    return _run(func, args, kwargs, dtype, cast)


def float32(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast floating arguments to float32."""
    return _run(func, args, kwargs, _FLOAT32, to_float32)


def upcast(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast low arguments to float32."""
    return _run(func, args, kwargs, _FLOAT32, _low_to_float32)


def promote(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast low arguments to float32 where dtypes up to float32 are mixed; torch promotes any other mix."""
    dtypes = {tensor.dtype for tensor in tensors(args, kwargs)}
    if len(dtypes) > 1 and dtypes <= _UP_TO_FLOAT32:
        return _run(func, args, kwargs, _FLOAT32, to_float32)
    return func(*args, **kwargs)


def arithmetic(scope: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """:func:`promote`, which torch itself does alike for these functions, bit for bit, if every tensor has a dimension."""
    if len(args) == 2 and not kwargs:
        first, second = args
        if not isinstance(second, Tensor) or not isinstance(first, Tensor) or (first.dim() and second.dim()):
            return func(first, second)
    return promote(scope, func, args, kwargs)


def cast_to_self(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast the other floating arguments to the dtype of the tensor that is written to."""
    dtype = args[0].dtype
    if dtype not in _UP_TO_FLOAT32:
        return func(*args, **kwargs)
    return _run(func, args, kwargs, dtype, lambda tensor: to(tensor, dtype))


def banned_in_place(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse a low tensor to write to."""
    dtype = (args[0] if args else kwargs["input"]).dtype
    if dtype in LOW:
        name = func.__name__
        raise BannedOpError(
            f"{name} on a {dtype} tensor: {name[:-1]} computes in float32 here, and a low tensor cannot hold "
            f"the result. Write x = x.{name[:-1]}(...) without the underscore, or call it inside disable_casts()"
        )
    return func(*args, **kwargs)


def banned(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse any low argument."""
    dtype = next((tensor.dtype for tensor in tensors(args, kwargs) if tensor.dtype in LOW), None)
    if dtype is not None:
        raise BannedOpError(
            f"{func.__name__} on a {dtype} tensor: it rounds probabilities near 1 to 1, where the gradient reaches 1e12. Best "
            "remove the sigmoid before it and use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss. Or give "
            f"it float32: {func.__name__}(x.float(), ...); with amp also register_float_function(torch, 'sigmoid')"
        )
    return func(*args, **kwargs)


def composite(scope: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that is written in Python, with the scope applied to the calls it makes."""
    with scope:
        return COMPOSITE_BODIES[func.__qualname__](*args, **kwargs)


def cast_in_argument(scope: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that calls its first argument, with the scope applied to the calls that the argument makes."""
    function, *rest = args

    def in_scope(*inner: Any, **options: Any) -> Any:
        with scope:
            return function(*inner, **options)

    return func(in_scope, *rest, **kwargs)


def expose_memory(scope: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run as written, and cache no more casts of a weight whose memory the call exposes."""
    if not is_dynamo_compiling() and scope.cache is not None and isinstance(args[0], nn.Parameter):
        scope.cache.exclude(args[0])
    return func(*args, **kwargs)


def uncounted_write(scope: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run as written, and drop the cached casts, because the call writes weights without counting."""
    if not is_dynamo_compiling() and scope.cache is not None:
        scope.cache.clear()
    return func(*args, **kwargs)


def call_as_function(_: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function of torch instead of the method of the same name."""
    return getattr(torch, func.__name__)(*args, **kwargs)


RULES: Final[dict[str, Rule]] = {
    "low": low,
    "float32": float32,
    "upcast": upcast,
    "promote": promote,
    "arithmetic": arithmetic,
    "cast_to_self": cast_to_self,
    "banned_in_place": banned_in_place,
    "banned": banned,
    "composite": composite,
    "cast_in_argument": cast_in_argument,
    "expose_memory": expose_memory,
    "uncounted_write": uncounted_write,
    "call_as_function": call_as_function,
}
"""Every rule by its name."""


def _low_to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW else tensor


def _run(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, cast: Cast
) -> Any:
    """Call ``func`` with arguments through ``cast``, which leaves tensors of ``dtype`` as they are."""
    if kwargs.get("out") is not None:
        return func(*args, **kwargs)
    # Most arguments are None, or tensors that have the dtype: testing for that here saves function calls.
    cast_args = [
        arg if arg is None or (isinstance(arg, Tensor) and arg.dtype is dtype) else cast_value(arg, cast)
        for arg in args
    ]
    return func(*cast_args, **{key: cast_value(arg, cast) for key, arg in kwargs.items()})
