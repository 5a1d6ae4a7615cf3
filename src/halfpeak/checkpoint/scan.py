"""The budget of a pickle: its opcodes are counted before torch builds anything from them."""

from __future__ import annotations

import pickletools
import re
from collections.abc import Sequence
from mmap import mmap
from typing import Final, NamedTuple

from halfpeak.core.errors import CheckpointError

MAX_DEPTH: Final = 200
"""Deepest nesting: Python hashes nested tuples by recursion in C, which ends the process where the stack ends."""

MAX_ODD_KEYS: Final = 10_000
"""Most tuples and long integers as keys: their hashes are not randomised, so that a file can make all collide."""

_SIZES: Final = {
    1: "PROTO BININT1 BINGET BINPUT LONG1 SHORT_BINSTRING",
    2: "BININT2",
    4: "BININT LONG_BINGET LONG_BINPUT BINUNICODE",
    8: "BINFLOAT",
    0: "STOP MARK NONE NEWTRUE NEWFALSE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET APPEND APPENDS "
    "SETITEM SETITEMS BINPERSID REDUCE NEWOBJ BUILD GLOBAL",
}
"""The opcodes of torch's safe reader, by the bytes of their number. None removes a value from the stack alone."""

_CODES: Final = {
    ord(opcode.code): (opcode.name, size)
    for opcode in pickletools.opcodes
    for size, names in _SIZES.items()
    if opcode.name in names.split()
}

_PARTS: Final = {
    **dict.fromkeys(("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), 0),
    **dict.fromkeys(("TUPLE1", "BINPERSID", "APPEND", "BUILD", "STOP"), 1),
    **dict.fromkeys(("TUPLE2", "REDUCE", "NEWOBJ", "SETITEM"), 2),
    "TUPLE3": 3,
}
"""How many values an opcode takes from the stack, beside the one that it adds to. Others take those after a mark."""

_MARKED: Final = frozenset({"TUPLE", "APPENDS", "SETITEMS"})
_TUPLES: Final = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_ADDS: Final = {"APPEND": list, "APPENDS": list, "SETITEM": dict, "SETITEMS": dict, "BUILD": object}
_HASHES: Final = re.compile(r"collections\.(OrderedDict|Counter)|(builtins|__builtin__)\.set")
_ALLOCATES: Final = re.compile(
    r"torch\.(\w+\.)*\w*(Tensor|Storage)|torch\._utils\._rebuild_wrapper_subclass|(builtins|__builtin__)\.bytearray"
)
"""What torch's reader would call with any number as the size."""


class _Value:
    """What is known of a container, a global or the result of a call on the stack. There, a string is itself, and other
    values of fixed size are None, because a file may hold millions of them.

    Attributes:
        depth: how deep it is nested.
        size: how many values it has, with all references unrolled.
        tuples: how many tuples are in it.
        text: the name of a global.
        texts: the texts of the first items of a tuple.
        made_by: the global that was called for it.
        is_new: whether it is not from the memo.
    """

    __slots__ = ("depth", "is_new", "made_by", "size", "text", "texts", "tuples")

    def __init__(self, parts: Sequence[_Value | str | None] = (), text: str = "") -> None:
        self.depth, self.size, self.tuples = 1, 1 + len(text) // 8, 0
        self.text, self.made_by, self.is_new = text, "", True
        self.texts = tuple([part if type(part) is str else getattr(part, "text", "") for part in parts[:4]])
        self.add(parts)

    def add(self, parts: Sequence[_Value | str | None]) -> None:
        for part in parts:
            if part is None:
                self.size += 1
            elif isinstance(part, str):
                self.size += 1 + len(part) // 8
            else:
                self.depth = max(self.depth, 1 + part.depth)
                self.size += part.size
                self.tuples += part.tuples
        if parts:
            self.depth = max(self.depth, 2)

    def again(self) -> _Value:
        """The same value from the memo."""
        one = _Value((), self.text)
        one.depth, one.size, one.tuples, one.is_new = self.depth, self.size, self.tuples, False
        return one


class Scan(NamedTuple):
    """What one pickle holds.

    Attributes:
        filled: what is called in it whose results get items: ``list`` for appended ones, else ``dict``.
        names: its GLOBAL opcodes.
        end: where the next pickle begins.
    """

    filled: dict[str, type]
    names: set[bytes]
    end: int


def scan(data: bytes | mmap, at: int = 0) -> Scan:
    """Read the opcodes of the pickle that begins at ``at``; nothing is built, imported or called.

    torch's reader then takes time and memory in proportion to the size of ``data``.

    Raises:
        CheckpointError: the pickle is nested too deep, has more than four values for each byte and a million if references
            are unrolled, or calls what torch does not. A broken pickle raises any exception.
    """
    stack, marks, memo = list[_Value | str | None](), list[int](), dict[int, _Value | str | None]()
    filled, names = dict[str, type](), set[bytes]()
    left, odd = 4 * len(data) + 1_000_000, 0
    while True:
        name, size = _CODES.get(data[at], ("", 0))
        if not name:
            raise CheckpointError(
                f"its pickle has the opcode {data[at]:#04x}, which torch's reader does not take"
            )
        begin, at = at + 1, at + 1 + size
        value: _Value | str | None = None
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[int.from_bytes(data[begin:at], "little")] = stack[-1]
            continue
        if name in ("BINUNICODE", "SHORT_BINSTRING"):
            begin, at = at, at + int.from_bytes(data[begin:at], "little")
            value = data[begin:at].decode("utf-8" if size == 4 else "latin-1", "replace")
        elif name in ("BINGET", "LONG_BINGET"):
            value = memo[int.from_bytes(data[begin:at], "little")]
            left -= 1
            if isinstance(value, str):
                left -= len(value) // 8
            elif value is not None:
                value = value.again()
                left -= value.size - 1
            if left < 0:
                raise CheckpointError("its pickle repeats the same data again and again")
        elif name == "MARK":
            marks.append(len(stack))
            continue
        elif name == "PROTO":
            continue
        elif name == "GLOBAL":
            at = _line_end(data, _line_end(data, at))
            names.add(data[begin - 1 : at])
            value = _Value((), data[begin : at - 1].decode().replace("\n", "."))
        elif name == "LONG1":
            begin, at = at, at + data[begin]
            odd += not -(2**60) < int.from_bytes(data[begin:at], "little", signed=True) < 2**60
        elif name in _MARKED or name in _PARTS:
            start = marks.pop() if name in _MARKED else len(stack) - _PARTS[name]
            if start < (name in _ADDS):
                raise CheckpointError("its pickle takes values that it does not have")
            parts = stack[start:]
            del stack[start:]
            if name == "STOP":
                return Scan(filled, names, at)
            if name in _ADDS:
                value = stack.pop()
                if not isinstance(value, _Value) or value.text or not value.is_new:
                    raise CheckpointError("its pickle changes a value after its use")
                value.add(parts)
                if name != "BUILD":
                    filled[value.made_by] = _ADDS[name]
                if _ADDS[name] is dict:
                    odd += sum([key.tuples for key in parts[::2] if isinstance(key, _Value)])
            elif name in ("REDUCE", "NEWOBJ"):
                function, arguments = parts
                value = _Value([arguments])
                value.made_by = _check_call(function, arguments)
                odd += value.tuples if _HASHES.fullmatch(value.made_by) else 0
                value.tuples = 0
            else:
                value = _Value(parts)
                value.tuples += name in _TUPLES
            if value.depth > MAX_DEPTH:
                raise CheckpointError(f"its pickle is nested more than {MAX_DEPTH} levels deep")
        if odd > MAX_ODD_KEYS:
            raise CheckpointError(f"its pickle has more than {MAX_ODD_KEYS} tuples or long integers as keys")
        stack.append(value)


def _line_end(data: bytes | mmap, at: int) -> int:
    end = data.find(b"\n", at)
    if end < 0:
        raise CheckpointError("its pickle is cut off", damaged=True)
    return end + 1


def _check_call(function: _Value | str | None, arguments: _Value | str | None) -> str:
    """The name of what is called, which is a global that torch's files call, with arguments as they have."""
    name = function.text if isinstance(function, _Value) else ""
    texts = arguments.texts if isinstance(arguments, _Value) else ()
    is_retyped = name == "torch._tensor._rebuild_from_type_v2"
    if is_retyped and not "".join(texts[:1]).startswith("torch._utils._rebuild_"):
        raise CheckpointError("its pickle makes a tensor in a way that torch does not write")
    is_slow = name == "_codecs.encode" and texts[1:] != ("latin1",)
    if not name or is_slow or _ALLOCATES.fullmatch(name):
        raise CheckpointError(f"its pickle calls {name or 'a value':.200} with arguments of its own")
    return name
