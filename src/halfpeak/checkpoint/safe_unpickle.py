"""An unpickler that reads pickles as data: it imports and calls nothing that a pickle names.

This is the only file of the package that uses the ``pickle`` module. It disables the parts that execute code:

- ``find_class`` returns a :class:`Symbol`, which is only a name, and never looks into ``sys.modules``. The extension
  registry of ``copyreg``, which the standard unpickler reads without ``find_class``, is not used either.
- Opcodes that call or change objects (REDUCE, NEWOBJ, INST, OBJ, BUILD, APPEND, SETITEM, ...) are replaced. A call
  becomes a :class:`Record` of the call, or plain data for the few functions in ``_MEANINGS``. Values are put into
  plain lists and dicts only; no ``__setstate__``, ``append`` or ``__setitem__`` of another class runs.
- Any opcode that is not in the ``dispatch`` table below is an error.

The base class is the Python class ``pickle._Unpickler``, as in ``torch.package``, and not the C class
``pickle.Unpickler``. The C class hashes keys, resizes its memo to the highest index and allocates what a length field
says before our code can check. So a few bytes end the process: a key of three million nested tuples overflows the C
stack, and ``LONG_BINPUT 2**32 - 1`` requests 64 GiB. This class checks keys before hashing and lengths before reading.

Limits: a file of n bytes takes at most about 320 n bytes of memory besides its tensors (reached by n empty sets),
``MAX_READS`` reads, and ``COPIES`` n (plus a million) copied elements.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, BinaryIO, Final, NamedTuple

import torch
from torch import Tensor

from halfpeak.core.errors import CheckpointError

MAX_READS: Final = 50_000_000
"""Maximum number of reads from the file; an opcode takes one to three."""

COPIES: Final = 4
"""Maximum number of elements that calls such as ``torch.Size(tuple)`` may copy, per byte of the pickle."""

MAX_NAME: Final = 500
MAX_KEY: Final = 1000
"""Maximum values inside a tuple key, or bytes in an int key. Tuples that share elements may hold exponentially many."""

MAX_ODD_KEYS: Final = 10_000
"""Maximum keys that are tuples or long integers: their hashes are not randomised, so a file can make all collide."""


class Symbol(NamedTuple):
    """A class or function that a pickle names, such as ``argparse.Namespace``."""

    name: str


@dataclass(eq=False, slots=True)
class Record:
    """A call that a pickle asks for, which was not made, and what the pickle would have put into the result.

    Records compare and hash by identity.

    Attributes:
        made_by: the callable: a :class:`Symbol`, or another record.
        args: the arguments of the call.
        state: the value for ``__setstate__`` or ``__dict__``.
        items: the values for ``append`` or ``add``.
        entries: the keys and values for ``__setitem__``.
    """

    made_by: Any
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] | None = None
    entries: dict[Any, Any] | None = None

    @property
    def name(self) -> str:
        """The name of the class or function; ``"an object"`` if the callable is a record."""
        return self.made_by.name if isinstance(self.made_by, Symbol) else "an object"


class Storage(NamedTuple):
    """The bytes and dtype of a tensor's storage; ``data`` is None if storages are not read."""

    dtype: torch.dtype
    data: Tensor | None  # u8[bytes]


_INHERITED: Final = tuple(
    "PROTO STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "  # noqa: SIM905
    "STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST EMPTY_DICT GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT "
    "MEMOIZE PERSID BINPERSID GLOBAL STACK_GLOBAL INST OBJ EXT1 EXT2 EXT4".split()
)
"""Opcodes kept from the base class: they push plain values, move values on the stack, or call a method below."""


class SafeUnpickler(pickle._Unpickler):
    """An unpickler that returns plain data, with a :class:`Record` in place of every other object.

    Args:
        file: a file positioned at a pickle. :meth:`read_value` leaves the position after the pickle.
        size: bytes to the end of the file. A length in the pickle that goes beyond it is an error.
        read_storage: returns the bytes of a storage by its key; None reads no tensors.

    Attributes:
        symbols: every class or function that the pickle names, in order of appearance.
        item_sizes: bytes per element of every storage that the pickle names, by its key.
    """

    # Attributes of the base class: the stack above the last mark, and the methods that change it and read on.
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]

    def __init__(
        self, file: BinaryIO, size: int, read_storage: Callable[[str], bytearray] | None = None
    ) -> None:
        super().__init__(_Source(file, size), encoding="latin-1")
        self.symbols: dict[str, None] = {}
        self.item_sizes: dict[str, int] = {}
        self._read_storage = read_storage
        self._storages: dict[str, Tensor] = {}
        self._copies_left = COPIES * size + 1_000_000
        self._odd_keys = 0

    def read_value(self) -> Any:
        """The value of the next pickle.

        Raises:
            CheckpointError: there is no pickle, it is broken, or it exceeds a limit of this module.
        """
        self.memo = {}
        try:
            return self.load()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"the pickle is broken: {type(error).__name__}") from None

    def find_class(self, module: str, name: str) -> Symbol:
        """The class or function as a name; nothing is imported."""
        if len(module) + len(name) > MAX_NAME:
            raise CheckpointError(f"the pickle names something with more than {MAX_NAME} characters")
        full = f"{module}.{name}"
        self.symbols[full] = None
        return Symbol(full)

    def persistent_load(self, pid: Any) -> Storage:
        """The storage that torch's persistent id names, once its size is checked against the bytes in the file."""
        # Only exact types and a short tuple: comparing, hashing or copying any other value may take forever.
        if type(pid) is not tuple or not 5 <= len(pid) <= 6 or type(pid[0]) is not str or pid[0] != "storage":
            raise CheckpointError("the pickle has a persistent id that torch does not write")
        kind, key, numel = pid[1], pid[2], pid[4]
        dtype = _DTYPES.get(kind.name.replace("torch.cuda.", "torch.")) if type(kind) is Symbol else None
        if dtype is None or type(key) is not str or type(numel) is not int:
            raise CheckpointError("a storage of the file has no known type")
        self.item_sizes[key] = dtype.itemsize
        if self._read_storage is None:
            return Storage(dtype, None)
        if key not in self._storages:
            raw = self._read_storage(key)
            self._storages[key] = (
                torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
            )
        data = self._storages[key]
        if numel * dtype.itemsize > len(data):
            raise CheckpointError(
                f"storage {key!r:.100} declares more than the {len(data)} bytes that it has"
            )
        return Storage(dtype, data)

    def call(self, made_by: Any, args: Any) -> Any:
        """The plain data that a call of ``made_by`` would return, or a record of the call."""
        if type(made_by) not in (Symbol, Record) or type(args) is not tuple:
            raise CheckpointError("the pickle calls something that is neither a class nor a function")
        meaning = _MEANINGS.get(made_by.name) if type(made_by) is Symbol else None
        if meaning is None:
            return Record(made_by, args)
        self.count_copies(args)
        found = meaning(self, *args)
        return Record(made_by, args) if found is _UNKNOWN else found

    def count_copies(self, args: Sequence[Any]) -> None:
        """Count the elements that a call copies, because a pickle can pass one long tuple to a million calls."""
        self._copies_left -= len(args) + sum(len(one) for one in args if type(one) in _SIZED)
        if self._copies_left < 0:
            raise CheckpointError("the pickle copies the same data again and again")

    def set_items(self, target: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> None:
        """Fill a dict; keys whose hash could take long to compute are checked first."""
        for key, value in pairs:
            if type(key) is not str:
                self._check_key(key)
            target[key] = value

    def _check_key(self, key: Any) -> None:
        if (type(key) is int and -(2**63) <= key < 2**64) or type(key) not in (int, tuple, Storage):
            return
        self._odd_keys += 1
        if self._odd_keys > MAX_ODD_KEYS:
            raise CheckpointError(
                f"the pickle has more than {MAX_ODD_KEYS} keys that are tuples or long integers"
            )
        inside = [key]
        for one in inside:  # `inside` grows while it is iterated
            if isinstance(one, tuple):
                inside.extend(one[: MAX_KEY + 1])
            if len(inside) > MAX_KEY or (type(one) is int and one.bit_length() > 8 * MAX_KEY):
                raise CheckpointError(f"the pickle has a key of more than {MAX_KEY} values")

    def _skip_frame(self) -> None:
        self.read(8)

    def _dict(self) -> None:
        made: dict[Any, Any] = {}
        self.set_items(made, _pairs(self.pop_mark()))
        self.append(made)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items(self._entries(), [(key, value)])

    def _set_items(self) -> None:
        pairs = _pairs(self.pop_mark())
        self.set_items(self._entries(), pairs)

    def _entries(self) -> dict[Any, Any]:
        target = self.stack[-1]
        if type(target) is Record:
            target.entries = {} if target.entries is None else target.entries
            return target.entries
        if type(target) not in (dict, OrderedDict):
            raise CheckpointError(f"the pickle sets keys of a {type(target).__name__}")
        return target

    def _append(self) -> None:
        value = self.stack.pop()
        self._items().append(value)

    def _append_many(self) -> None:
        values = self.pop_mark()
        self._items().extend(values)

    def _items(self) -> list[Any]:
        target = self.stack[-1]
        if type(target) is Record:
            target.items = [] if target.items is None else target.items
            return target.items
        if type(target) is not list:
            raise CheckpointError(f"the pickle appends to a {type(target).__name__}")
        return target

    def _empty_set(self) -> None:
        self.append(Record(_SET, ()))

    def _frozenset(self) -> None:
        values = self.pop_mark()
        self.append(Record(_FROZENSET, (values,)))

    def _reduce(self) -> None:
        args, made_by = self.stack.pop(), self.stack.pop()
        self.append(self.call(made_by, args))

    def _new_object_ex(self) -> None:
        named, args, made_by = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.append(Record(made_by, (args, named)))

    def _instantiate(self, klass: Any, args: list[Any]) -> None:
        """Called by the base class for the opcodes INST and OBJ."""
        self.append(Record(klass, tuple(args)))

    def get_extension(self, code: int) -> None:
        """Called by the base class for the opcodes EXT1, EXT2 and EXT4."""
        self.append(self.find_class("copyreg", f"extension_{code}"))

    def _build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is Record:
            self.stack[-1].state = state

    dispatch = MappingProxyType(  # pyright: ignore[reportAssignmentType]
        {
            **{
                getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
                for name in _INHERITED
            },
            pickle.FRAME[0]: _skip_frame,
            pickle.DICT[0]: _dict,
            pickle.SETITEM[0]: _set_item,
            pickle.SETITEMS[0]: _set_items,
            pickle.APPEND[0]: _append,
            pickle.APPENDS[0]: _append_many,
            pickle.EMPTY_SET[0]: _empty_set,
            pickle.ADDITEMS[0]: _append_many,
            pickle.FROZENSET[0]: _frozenset,
            pickle.REDUCE[0]: _reduce,
            pickle.NEWOBJ[0]: _reduce,
            pickle.NEWOBJ_EX[0]: _new_object_ex,
            pickle.BUILD[0]: _build,
        }
    )


class _Source:
    """A file of known size: a read beyond its end raises before anything is allocated."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size
        self._reads_left = MAX_READS

    def read(self, length: int) -> bytes:
        self._reads_left -= 1
        if length > self._left or self._reads_left < 0:
            raise CheckpointError(
                "the pickle is broken: it is cut off, or a length in it is wrong"
                if length > self._left
                else f"the pickle takes more than {MAX_READS} reads"
            )
        self._left -= length
        return self._file.read(length)

    def readline(self) -> bytes:
        self._reads_left -= 1
        line = self._file.readline(self._left)
        self._left -= len(line)
        return line


def _pairs(flat: list[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


_SET: Final = Symbol("builtins.set")
_FROZENSET: Final = Symbol("builtins.frozenset")
_SIZED: Final = frozenset({tuple, list, dict, str, bytes})
_UNKNOWN: Final = object()
"""Returned by a function of ``_MEANINGS`` whose arguments do not describe plain data."""

_DTYPES: Final = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.storage._UntypedStorage": torch.uint8,
}

DTYPES: Final = {str(dtype): dtype for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, *_DTYPES.values())}


def _ordered_dict(reader: SafeUnpickler, pairs: Any = ()) -> OrderedDict[Any, Any]:
    made = OrderedDict[Any, Any]()
    reader.set_items(made, ((key, value) for key, value in pairs))
    return made


def _default_dict(reader: SafeUnpickler, *_: Any) -> dict[Any, Any]:
    return {}


def _counter(reader: SafeUnpickler, counts: Any = ()) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    reader.set_items(made, counts.items() if type(counts) is dict else counts)
    return made


def _size(reader: SafeUnpickler, sizes: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sizes)


def _bytes(reader: SafeUnpickler, text: str, encoding: str) -> Any:
    return text.encode("latin-1") if type(text) is str and encoding == "latin1" else _UNKNOWN


def _tensor(reader: SafeUnpickler, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> Any:
    """A strided view of a storage, once its bounds are checked; None if storages are not read.

    ``more[2]``, if there is one, is the dtype of an untyped storage.
    """
    if type(storage) is not Storage or storage.data is None:
        return None
    named = more[2] if len(more) > 2 and type(more[2]) is Symbol else None
    dtype = storage.dtype if named is None else DTYPES.get(named.name)
    numbers = (offset, *size, *stride)
    if dtype is None or len(size) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
        raise CheckpointError("a tensor of the file has an impossible shape")
    if 0 in size:
        return torch.empty(tuple(size), dtype=dtype)
    held = len(storage.data) // dtype.itemsize
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= held:
        raise CheckpointError(f"a tensor of the file reaches to element {last} of a storage of {held}")
    return storage.data[: held * dtype.itemsize].view(dtype).as_strided(tuple(size), tuple(stride), offset)


def _parameter(reader: SafeUnpickler, data: Any, *_: Any) -> Any:
    return data


def _tensor_of_a_type(reader: SafeUnpickler, function: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor that was saved with Python attributes; the attributes are dropped."""
    plain = type(kind) is Symbol and kind.name in ("torch.Tensor", "torch.nn.parameter.Parameter")
    known = type(function) is Symbol and function.name in _REBUILDS
    return reader.call(function, args) if plain and known else _UNKNOWN


def _number(reader: SafeUnpickler, dtype: Any, data: Any = None) -> Any:
    """A NumPy scalar as a Python number."""
    kind = dtype.args[0] if type(dtype) is Record and dtype.args else None
    code = _NUMBERS.get(kind) if type(kind) is str else None
    return struct.unpack(code, data)[0] if code and type(data) is bytes else _UNKNOWN


_NUMBERS: Final = {"f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "u1": "<B", "b1": "<?"}

_REBUILDS: Final = frozenset(
    f"torch._utils.{name}"
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
)

_MEANINGS: Final[dict[str, Callable[..., Any]]] = {
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict,
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
"""Calls that this module evaluates to plain data itself, without calling the named libraries."""

PLAIN_SYMBOLS: Final = frozenset(
    {
        *_MEANINGS,
        *DTYPES,
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "numpy.dtype",
    }
)
"""Names of classes and functions that pickles of plain data contain."""


def is_plain_symbol(name: str) -> bool:
    """Whether pickles of plain data may contain this name."""
    return name in PLAIN_SYMBOLS or (name.startswith("torch.") and name.endswith("Storage"))
