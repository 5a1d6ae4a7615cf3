"""The table from functions to rules: the lists, with what a user changed about them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final
from weakref import WeakValueDictionary

import torch

from halfpeak.casting import oplists
from halfpeak.casting.resolve import functions
from halfpeak.casting.rules import RULES, Casting, Function, Rule
from halfpeak.casting.walk import tensors

_LISTS: Final[tuple[tuple[oplists.Rows, str], ...]] = (
    (oplists.LOW, "low"),
    (oplists.FLOAT32, "float32"),
    (oplists.WIDEN, "widen"),
    (oplists.PROMOTE, "promote"),
    (oplists.MATCH_SELF, "match_self"),
    (oplists.BANNED_IN_PLACE, "banned_in_place"),
    (oplists.BANNED, "banned"),
    (oplists.COMPOSITE, "composite"),
    (oplists.ESCAPES, "escape"),
    (oplists.OVERWRITES, "overwrite"),
    (oplists.AS_FUNCTION, "as_function"),
)

_NEVER_CASTING: Final = {"composite", "escape", "overwrite", "as_function"}

KINDS: Final = ("low", "float32", "promote")
"""The rules that a user can give to a function. Each is also a key of every table, for the decorators."""


class Table:
    """Which rule each function has.

    Args:
        changes: names of rules by function, in place of the listed ones.
        report: called with a text such as ``"Float->Half (linear)"`` for every cast that is not traced.

    Attributes:
        names: the name of the rule of each key.
        rules: the rule of each key.
        key: a string that no table with other rules has.
    """

    def __init__(self, changes: Mapping[Any, str], report: Callable[[str], None] | None = None) -> None:
        self.names: dict[Any, str] = {**listed(), **{kind: kind for kind in KINDS}, **changes}
        self.rules: dict[Any, Rule] = {key: RULES[name] for key, name in self.names.items()}
        if report is not None:
            casting = {key: rule for key, rule in self.rules.items() if self.names[key] not in _NEVER_CASTING}
            self.rules.update({key: _reporting(rule, report) for key, rule in casting.items()})
        self.key = f"table {next(_numbers)}" if changes else "listed"
        _tables[self.key] = self


@functools.cache
def listed() -> dict[Any, str]:
    """The name of the rule of every listed function that this torch has."""
    return {function: rule for rows, rule in _LISTS for function in functions(rows)}


def traced_rule(func: Function, key: str) -> str:
    """The name of the rule of ``func`` in the table ``key``, or an empty string.

    While :func:`torch.compile` traces, this stands for the lookup in a table: it runs it and takes the result for a
    constant, since it cannot trace a dict of functions.
    """
    table = _tables.get(key)
    return "" if table is None else table.names.get(func, "")


# What torch.compiler.assume_constant_result does, without importing the compiler.
traced_rule._dynamo_marked_constant = True  # type: ignore[attr-defined]

_tables: Final[WeakValueDictionary[str, Table]] = WeakValueDictionary()
_numbers: Final = itertools.count()


_SPELLED: Final = {
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
}


def _reporting(rule: Rule, report: Callable[[str], None]) -> Rule:
    """``rule``, telling ``report`` what it cast."""

    def reporting(scope: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        @functools.wraps(func, updated=())
        def spy(*cast_args: Any, **cast_kwargs: Any) -> Any:
            for before, after in zip(tensors(args, kwargs), tensors(cast_args, cast_kwargs), strict=True):
                if before.dtype is not after.dtype:
                    report(f"{_SPELLED[before.dtype]}->{_SPELLED[after.dtype]} ({func.__name__})")
            return func(*cast_args, **cast_kwargs)

        return rule(scope, spy, args, kwargs)

    return reporting
