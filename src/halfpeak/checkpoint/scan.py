"""The budget of a pickle: its opcodes are counted before torch builds anything from them."""

from __future__ import annotations

import pickletools
import re
from collections.abc import Sequence
from typing import Any, BinaryIO, Final, cast

from halfpeak.core.errors import CheckpointError

MAX_DEPTH: Final = 200
"""Deepest nesting: Python hashes nested tuples by recursion in C, which ends the process where the stack ends."""

MAX_ODD_KEYS: Final = 10_000
"""Most tuples and long integers as keys: their hashes are not randomised, so that a file can make all collide."""

_OPCODES: Final = frozenset(
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINSTRING BINUNICODE TUPLE TUPLE1 "  # noqa: SIM905
    "TUPLE2 TUPLE3 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET APPEND APPENDS SETITEM SETITEMS BINGET LONG_BINGET BINPUT "
    "LONG_BINPUT GLOBAL BINPERSID REDUCE NEWOBJ BUILD".split()
)
"""The opcodes of torch's safe reader. None of them removes a value from the stack alone."""

_MARKED: Final = frozenset({"TUPLE", "APPENDS", "SETITEMS"})
_TUPLES: Final = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_ADDS: Final = {"APPEND": list, "APPENDS": list, "SETITEM": dict, "SETITEMS": dict, "BUILD": object}
_HASHES: Final = re.compile(r"collections\.(OrderedDict|Counter)|(builtins|__builtin__)\.set")
_ALLOCATES: Final = re.compile(
    r"torch\.(\w+\.)*\w*(Tensor|Storage)|torch\._utils\._rebuild_wrapper_subclass|(builtins|__builtin__)\.bytearray"
)
"""What torch's reader would call with any number as the size."""


class _Value:
    """What is known of a value on the stack.

    Attributes:
        depth: how deep it is nested.
        size: how many values it has, with all references unrolled.
        tuples: how many tuples are in it.
        text: a string, or the name of a global.
        texts: the texts of the first items of a tuple.
        made_by: the global that was called for it.
        is_global: whether it is a class or function.
        is_new: whether it is not from the memo.
    """

    __slots__ = ("depth", "is_global", "is_new", "made_by", "size", "text", "texts", "tuples")

    def __init__(self, text: str, parts: Sequence[_Value], *, is_global: bool = False) -> None:
        self.depth, self.size, self.tuples = 1, 1 + len(text) // 8, 0
        self.text, self.made_by = text, ""
        self.texts = tuple([part.text for part in parts[:4]]) if parts else ()
        self.is_global, self.is_new = is_global, True
        if parts:
            self.add(parts)

    def add(self, parts: Sequence[_Value]) -> None:
        for part in parts:
            self.depth = max(self.depth, 1 + part.depth)
            self.size += part.size
            self.tuples += part.tuples


def scan(file: BinaryIO, size: int) -> dict[str, type]:
    """Read the opcodes of one pickle of at most ``size`` bytes; nothing is built, imported or called.

    Returns what is called in it whose results get items: ``list`` for appended ones, else ``dict``. torch's reader then
    takes time and memory in proportion to ``size``.

    Raises:
        CheckpointError: the pickle is nested too deep, has more than four values for each byte and a million if references
            are unrolled, or calls what torch does not. A broken pickle raises any exception.
    """
    stack, marks, memo, filled = list[_Value](), list[int](), dict[int, _Value](), dict[str, type]()
    left, odd = 4 * size + 1_000_000, 0
    for opcode, given, _ in pickletools.genops(file):
        name, arg, adds = opcode.name, cast(Any, given), opcode.name in _ADDS
        if name not in _OPCODES:
            raise CheckpointError(f"its pickle has the opcode {name}, which torch's reader does not take")
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[arg] = stack[-1]
            continue
        if name == "MARK":
            marks.append(len(stack))
            continue
        start = marks.pop() if name in _MARKED else len(stack) - len(opcode.stack_before) + adds
        if start < adds:
            raise CheckpointError("its pickle takes values that it does not have")
        values = stack[start:]
        del stack[start:]
        if adds:
            value = stack.pop()
            if value.is_global or not value.is_new:
                raise CheckpointError("its pickle changes a value after its use")
            value.add(values)
            if name != "BUILD":
                filled[value.made_by] = _ADDS[name]
            if _ADDS[name] is dict:
                odd += sum(key.tuples for key in values[::2])
        elif name in ("BINGET", "LONG_BINGET"):
            seen = memo[arg]
            value = _Value(seen.text, (), is_global=seen.is_global)
            value.depth, value.size, value.tuples, value.is_new = seen.depth, seen.size, seen.tuples, False
            left -= value.size
        elif name in ("REDUCE", "NEWOBJ"):
            function, arguments = values
            _check_call(function, arguments)
            value = _Value("", [arguments])
            value.made_by = function.text
            odd += value.tuples if _HASHES.fullmatch(value.made_by) else 0
            value.tuples = 0
        else:
            is_global = name == "GLOBAL"
            text = "" if type(arg) is not str else arg.replace(" ", ".") if is_global else arg
            value = _Value(text, values, is_global=is_global)
            value.tuples += name in _TUPLES
            odd += name == "LONG1" and not -(2**60) < arg < 2**60
        if value.depth > MAX_DEPTH:
            raise CheckpointError(f"its pickle is nested more than {MAX_DEPTH} levels deep")
        if left < 0:
            raise CheckpointError("its pickle repeats the same data again and again")
        if odd > MAX_ODD_KEYS:
            raise CheckpointError(f"its pickle has more than {MAX_ODD_KEYS} tuples or long integers as keys")
        if opcode.stack_after:
            stack.append(value)
    return filled


def _check_call(function: _Value, arguments: _Value) -> None:
    name = function.text if function.is_global else ""
    is_retyped = name == "torch._tensor._rebuild_from_type_v2"
    if is_retyped and not "".join(arguments.texts[:1]).startswith("torch._utils._rebuild_"):
        raise CheckpointError("its pickle makes a tensor in a way that torch does not write")
    is_slow = name == "_codecs.encode" and arguments.texts[1:] != ("latin1",)
    if not name or is_slow or _ALLOCATES.fullmatch(name):
        raise CheckpointError(f"its pickle calls {name or 'a value':.200} with arguments of its own")
