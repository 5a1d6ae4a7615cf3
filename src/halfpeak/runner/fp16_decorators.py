"""auto_fp16 and force_fp32, which set the dtype in which a method computes, and their cast. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain, repeat
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from halfpeak.casting.tree import map_tree
from halfpeak.core.errors import ConfigTypeError
from halfpeak.runner.fp16_model import casts_of

P = ParamSpec("P")
R = TypeVar("R")


def auto_fp16(
    apply_to: Iterable[str] | None = None,
    out_fp32: bool = False,
    supported_types: tuple[type, ...] = (nn.Module,),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a method compute in the low dtype if its object has ``fp16_enabled=True``; otherwise call it unchanged.

    It casts the arguments in ``apply_to`` from float32 and calls the method under ``torch.autocast``, or without it if the
    model's weights are low.

    Args:
        apply_to: names of the arguments to cast. None means every positional parameter. Keyword-only parameters and
            ``**kwargs`` are cast only if named. Defaults are never cast.
        out_fp32: cast the result to float32.
        supported_types: classes whose methods may be decorated.

    Raises:
        ConfigTypeError: used without parentheses; or the method is called on an object outside ``supported_types``.

    >>> class Model(nn.Linear):
    ...     fp16_enabled = False
    ...     @auto_fp16(apply_to=("x",))
    ...     def forward(self, x):
    ...         return super().forward(x)
    >>> model = Model(2, 2)
    >>> model.fp16_enabled = True
    >>> model(torch.ones(1, 2)).dtype
    torch.float16
    """
    return _decorator("auto_fp16", apply_to, supported_types, lowers=True, casts_back=out_fp32)


def force_fp32(
    apply_to: Iterable[str] | None = None, out_fp16: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a method compute in float32 if its module has ``fp16_enabled=True``; the opposite of :func:`auto_fp16`.

    Args:
        apply_to: names of the arguments to cast, as in :func:`auto_fp16`.
        out_fp16: cast the result to the low dtype.

    Raises:
        ConfigTypeError: used without parentheses; or the method is called on an object that is no module.
    """
    return _decorator("force_fp32", apply_to, (nn.Module,), lowers=False, casts_back=out_fp16)


def cast_tensor_type(inputs: Any, src_type: torch.dtype, dst_type: torch.dtype) -> Any:
    """Cast every tensor of ``src_type`` inside ``inputs`` to ``dst_type``; differentiable.

    Containers keep their types. Tensors of other dtypes, modules, strings, arrays and all other values pass through.

    >>> batch = {"image": torch.ones(1), "label": torch.ones(1, dtype=torch.int64)}
    >>> cast = cast_tensor_type(batch, torch.float32, torch.float16)
    >>> cast["image"].dtype, cast["label"].dtype
    (torch.float16, torch.int64)
    """

    def cast(leaf: Any) -> Any:
        return leaf.to(dst_type) if isinstance(leaf, Tensor) and leaf.dtype == src_type else leaf

    return map_tree(inputs, cast)


def _decorator(
    name: str,
    apply_to: Iterable[str] | None,
    supported_types: tuple[type, ...],
    *,
    lowers: bool,
    casts_back: bool,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that casts arguments to low (``lowers``) or float32, and with ``casts_back`` the result back."""
    if callable(apply_to):
        raise ConfigTypeError(f"@{name} needs parentheses; write @{name}()")
    wanted = None if apply_to is None else frozenset([apply_to] if isinstance(apply_to, str) else apply_to)

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        # inspect.signature follows __wrapped__, so decorators can be stacked.
        parameters = inspect.signature(method).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
        cast = frozenset([*names, rest]) if wanted is None else wanted

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            owner = args[0] if args else None
            if not isinstance(owner, supported_types):
                allowed = ", ".join(cls.__name__ for cls in supported_types)
                raise ConfigTypeError(
                    f"@{name} decorates methods of {allowed}; {method.__qualname__} was called on {type(owner).__name__}"
                )
            if not getattr(owner, "fp16_enabled", False):
                return method(*args, **kwargs)
            casts = casts_of(owner)
            outer, inner = (torch.float32, casts.dtype) if lowers else (casts.dtype, torch.float32)
            cast_args = [
                cast_tensor_type(arg, outer, inner) if name in cast and arg is not owner else arg
                for name, arg in zip(chain(names, repeat(rest)), args, strict=False)
            ]
            cast_kwargs = {
                key: cast_tensor_type(arg, outer, inner) if key in cast else arg
                for key, arg in kwargs.items()
            }
            autocast: Any = nullcontext()
            if casts.autocast:
                autocast = torch.autocast(_device_type(owner, args), casts.dtype, enabled=lowers)
            with autocast:
                result: Any = method(*cast_args, **cast_kwargs)  # type: ignore[call-arg]
            return cast_tensor_type(result, inner, outer) if casts_back else result

        return call

    return decorate


def _device_type(owner: object, args: tuple[Any, ...]) -> str:
    """The device type of a method: of its module's parameters, else of its first tensor, else the CPU."""
    parameter = next(owner.parameters(), None) if isinstance(owner, nn.Module) else None
    tensors = (arg for arg in args if isinstance(arg, Tensor))
    home = parameter if parameter is not None else next(tensors, None)
    return "cpu" if home is None else home.device.type
