"""``short_repr``: the text of any value for a message, in bounded time and length."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final, TypeGuard, cast

if TYPE_CHECKING:
    from torch import Tensor

LONGEST: Final = 120
_PARTS: Final = 6


def short_repr(value: object) -> str:
    """``repr(value)`` if that is short; else its beginning, or a description in a few words.

    A file of a few hundred bytes can hold a value whose ``repr`` fills the memory: lists that are shared, numbers of
    millions of digits. Control characters are escaped.

    >>> short_repr([1.5, "a"]), short_repr("x" * 1000) == "'" + "x" * 120 + "'..."
    ("[1.5, 'a']", True)
    >>> import torch
    >>> short_repr({"w": torch.ones(2, 3)}), short_repr(10**5000)
    ("{'w': a float32 tensor of (2, 3)}", 'an integer of 16610 bits')
    """
    text = _repr(value, depth=2)
    return text if len(text) <= LONGEST + 8 else f"{text[:LONGEST]}..."


def name_list(names: Sequence[str], most: int = 8) -> str:
    """The first names, and how many more there are.

    >>> name_list(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _repr(value: Any, depth: int) -> str:
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value) if len(value) <= LONGEST else f"{value[:LONGEST]!r}..."
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if _is_tensor(value):
        shape = "different shapes" if value.is_nested else str(tuple(value.shape))
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of {shape}"
    if not isinstance(value, (Mapping, list, tuple, Set)):
        return repr(value)
    parts = cast("Collection[Any]", value)
    if len(parts) > _PARTS or depth <= 0:
        return f"a {type(value).__name__} of {len(parts)}"
    if isinstance(value, Mapping):
        named = cast("Mapping[Any, Any]", value)
        return f"{{{', '.join(f'{_repr(key, 0)}: {_repr(named[key], depth - 1)}' for key in named)}}}"
    shown = ", ".join(_repr(part, depth - 1) for part in parts)
    if isinstance(value, tuple):
        return f"({shown},)" if len(parts) == 1 else f"({shown})"
    return f"[{shown}]" if isinstance(value, list) else f"{{{shown}}}"


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor; False before torch is imported, which ``--help`` does not do."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
