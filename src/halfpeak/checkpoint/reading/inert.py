"""Pickles read as data: what a pickle would import or call is written down, and nothing is imported or called."""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, Final

from halfpeak.checkpoint.reading.records import UNKNOWN, Rebuild, Record, Storage, Symbol, meaning_of
from halfpeak.core.errors import CheckpointError

MAX_OPCODES: Final = 20_000_000


class InertReader:
    """A reader that makes plain data, and keeps a record of every call that would make something else.

    Args:
        storage: what a persistent id stands for.
        rebuild: how a tensor is made of a storage.

    Attributes:
        symbols: every class or function that was named, in order of appearance.
    """

    def __init__(self, storage: Storage, rebuild: Rebuild) -> None:
        self.symbols: dict[str, None] = {}
        self._storage = storage
        self._rebuild = rebuild
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self, source: Any) -> Any:
        """The value of one pickle.

        Args:
            source: bytes, or a file at the start of the pickle, which is left behind its end.

        Raises:
            CheckpointError: this is no pickle, or one that is broken.
        """
        self._stack, self._marks, self._memo = [], [], {}
        try:
            for count, (opcode, argument, _) in enumerate(pickletools.genops(source)):
                if count > MAX_OPCODES:
                    raise CheckpointError(f"the pickle has more than {MAX_OPCODES} operations")
                self._do(opcode.name, argument)
            (value,) = self._stack
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"the pickle is broken: {type(error).__name__}") from None
        return value

    def _do(self, name: str, argument: Any) -> None:
        if name in _ARGUMENTS:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _MEMO_WRITES:
            self._memo[len(self._memo) if argument is None else argument] = self._stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            self._stack.append(tuple(self._take(int(name[-1]))))
        elif name not in ("PROTO", "FRAME", "STOP"):
            getattr(self, f"_{name.lower()}")(argument)

    def _take(self, count: int) -> list[Any]:
        if count > len(self._stack):
            raise IndexError
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return taken

    def _take_marked(self) -> list[Any]:
        return self._take(len(self._stack) - self._marks.pop())

    def _mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def _pop(self, _: Any) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _pop_mark(self, _: Any) -> None:
        self._take_marked()

    def _dup(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._take_marked()))

    def _list(self, _: Any) -> None:
        self._stack.append(self._take_marked())

    def _dict(self, _: Any) -> None:
        self._stack.append(_pairs(self._take_marked()))

    def _frozenset(self, _: Any) -> None:
        self._stack.append(Record(Symbol("builtins.frozenset"), (self._take_marked(),)))

    def _append(self, _: Any) -> None:
        self._extend(self._take(1))

    def _appends(self, _: Any) -> None:
        self._extend(self._take_marked())

    _additems = _appends

    def _setitem(self, _: Any) -> None:
        self._update(_pairs(self._take(2)))

    def _setitems(self, _: Any) -> None:
        self._update(_pairs(self._take_marked()))

    def _global(self, argument: str) -> None:
        self._stack.append(self._symbol(argument.replace(" ", ".", 1)))

    def _stack_global(self, _: Any) -> None:
        module, name = self._take(2)
        self._stack.append(self._symbol(f"{module}.{name}"))

    def _inst(self, argument: str) -> None:
        symbol = self._symbol(argument.replace(" ", ".", 1))
        self._stack.append(Record(symbol, tuple(self._take_marked())))

    def _obj(self, _: Any) -> None:
        made_by, *args = self._take_marked()
        self._stack.append(Record(made_by, tuple(args)))

    def _reduce(self, _: Any) -> None:
        made_by, args = self._take(2)
        self._stack.append(self._call(made_by, tuple(args)))

    _newobj = _reduce

    def _newobj_ex(self, _: Any) -> None:
        made_by, args, named = self._take(3)
        self._stack.append(Record(made_by, (*args, *named.items())))

    def _build(self, _: Any) -> None:
        (state,) = self._take(1)
        if isinstance(self._stack[-1], Record):
            self._stack[-1].state = state

    def _ext1(self, argument: int) -> None:
        self._stack.append(self._symbol(f"copyreg.extension_{argument}"))

    _ext2 = _ext4 = _ext1

    def _binpersid(self, _: Any) -> None:
        (identity,) = self._take(1)
        self._stack.append(self._storage(identity))

    def _persid(self, argument: str) -> None:
        self._stack.append(self._storage(argument))

    def _symbol(self, name: str) -> Symbol:
        self.symbols[name] = None
        return Symbol(name)

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        (target.items if isinstance(target, Record) else target).extend(values)

    def _update(self, values: dict[Any, Any]) -> None:
        target = self._stack[-1]
        (target.entries if isinstance(target, Record) else target).update(values)

    def _call(self, made_by: Any, args: tuple[Any, ...]) -> Any:
        meaning = meaning_of(made_by)
        found = UNKNOWN if meaning is None else meaning(self._rebuild, *args)
        return Record(made_by, args) if found is UNKNOWN else found


def _pairs(flat: list[Any]) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


_CONSTANTS: Final[dict[str, Callable[[], Any]]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": lambda: Record(Symbol("builtins.set"), ()),
}

_ARGUMENTS: Final = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    }
)
"""Operations that push their own argument."""

_MEMO_WRITES: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
