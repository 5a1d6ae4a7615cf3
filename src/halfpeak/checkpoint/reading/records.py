"""What a pickle names, as values of our own: classes, calls, and the few calls whose result is plain data."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple


class Symbol(NamedTuple):
    """A class or function that a pickle names, such as ``argparse.Namespace``."""

    name: str


@dataclass(eq=False, slots=True)
class Record:
    """What a pickle would have made by calling something: the call, and what it would have put into the result.

    Attributes:
        made_by: what would have been called: a :class:`Symbol`, or another record.
        args: with which arguments.
        state: what would have been given to ``__setstate__`` or put into ``__dict__``.
        items: what would have been appended.
        entries: what would have been set by key.
    """

    made_by: Any
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list[Any])
    entries: dict[Any, Any] = field(default_factory=dict[Any, Any])

    @property
    def name(self) -> str:
        """The name of the class or function, as far as there is one."""
        return self.made_by.name if isinstance(self.made_by, Symbol) else "an object"


Rebuild = Callable[[Any, Any, Any, Any, Any], Any]
"""Makes a tensor of (storage, offset, size, stride, dtype or None)."""

Storage = Callable[[Any], Any]
"""Makes a storage of a persistent id."""


Meaning = Callable[..., Any]
"""Makes plain data of (how to rebuild a tensor, the arguments of the call)."""

UNKNOWN: Final = object()
"""Given where the arguments are not those of plain data."""


def meaning_of(made_by: object) -> Meaning | None:
    """What calling this would give, if it is plain data."""
    return MEANINGS.get(made_by.name) if isinstance(made_by, Symbol) else None


def _ordered_dict(rebuild: Rebuild, pairs: Iterable[tuple[Any, Any]] = ()) -> OrderedDict[Any, Any]:
    return OrderedDict((key, value) for key, value in pairs)


def _dict(rebuild: Rebuild, *_: Any) -> dict[Any, Any]:
    return {}


def _counter(rebuild: Rebuild, counts: Any = ()) -> dict[Any, Any]:
    return dict(counts)


def _size(rebuild: Rebuild, sizes: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sizes)


def _bytes(rebuild: Rebuild, text: str, encoding: str) -> Any:
    return text.encode("latin-1") if encoding == "latin1" else UNKNOWN


def _tensor(rebuild: Rebuild, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> Any:
    """The third argument that follows, if there is one, is the dtype of an untyped storage."""
    return rebuild(
        storage, offset, size, stride, more[2] if len(more) > 2 and isinstance(more[2], Symbol) else None
    )


def _parameter(rebuild: Rebuild, data: Any, *_: Any) -> Any:
    return data


def _tensor_of_a_type(rebuild: Rebuild, function: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor with Python attributes, which are left behind."""
    meaning = meaning_of(function)
    plain = isinstance(kind, Symbol) and kind.name in ("torch.Tensor", "torch.nn.parameter.Parameter")
    return meaning(rebuild, *args) if meaning and plain else UNKNOWN


def _number(rebuild: Rebuild, dtype: Any, data: Any = None) -> Any:
    """A NumPy scalar as the number that it is."""
    code = _NUMBERS.get(dtype.args[0]) if isinstance(dtype, Record) and dtype.args else None
    return struct.unpack(code, data)[0] if code and isinstance(data, bytes) else UNKNOWN


_NUMBERS: Final = {"f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "u1": "<B", "b1": "<?"}

MEANINGS: Final[dict[str, Meaning]] = {
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _dict,
    "collections.Counter": _counter,
    "torch.Size": _size,
    "_codecs.encode": _bytes,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_a_type,
    "numpy.core.multiarray.scalar": _number,
    "numpy._core.multiarray.scalar": _number,
}
"""Calls whose result is plain data, each with what it means. Nothing of the named libraries is used for it."""
