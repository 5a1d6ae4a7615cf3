"""Finding and casting the tensors among the arguments of one operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

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
        items = [cast_value(item, cast) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)  # type: ignore[union-attr]
    return value


def cast_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], cast: Cast
) -> tuple[list[Any], dict[str, Any]]:
    """All arguments through :func:`cast_value`, in new containers."""
    return [cast_value(arg, cast) for arg in args], {
        key: cast_value(arg, cast) for key, arg in kwargs.items()
    }


def tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The castable tensors among the arguments, in order."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.dtype in CASTABLE:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value, {})
