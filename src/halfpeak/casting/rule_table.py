"""The table from functions to cast rules: the built-in lists, with the changes that the user registered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from halfpeak.casting import oplists
from halfpeak.casting.rules import RULES, Casting, Function, Rule
from halfpeak.casting.torch_functions import function_at, functions
from halfpeak.casting.tree import tensors

_LISTS: Final[tuple[tuple[oplists.Rows, str], ...]] = (
    (oplists.LOW, "low"),
    (oplists.FLOAT32, "float32"),
    (oplists.UPCAST, "upcast"),
    (oplists.PROMOTE, "promote"),
    (oplists.ARITHMETIC, "arithmetic"),
    (oplists.CAST_TO_SELF, "cast_to_self"),
    (oplists.BANNED_IN_PLACE, "banned_in_place"),
    (oplists.BANNED, "banned"),
    (oplists.COMPOSITE, "composite"),
    (oplists.CALLS_ARGUMENT, "cast_in_argument"),
    (oplists.EXPOSES_MEMORY, "expose_memory"),
    (oplists.UNCOUNTED_WRITES, "uncounted_write"),
    (oplists.CALL_AS_FUNCTION, "call_as_function"),
)

KINDS: Final = ("low", "float32", "promote")
"""The rules that a user can choose for a function. Each is also a key of every table, for the decorators."""


class Table:
    """The cast rule of each function.

    Args:
        changes: names of rules by the path of a torch function, in place of the listed ones.
        places: names of rules for functions that torch does not dispatch, by module and name.
        report: called with a text such as ``"Float->Half (linear)"`` for every cast that is not traced.

    Attributes:
        rules: the rule of each function, place and kind.
        key: the changes as text.
    """

    def __init__(
        self,
        changes: Mapping[str, str],
        places: Mapping[Any, str],
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.key = " ".join(f"{path}={rule}" for path, rule in sorted(changes.items()))
        names = {**_names(self.key), **places, **dict(zip(KINDS, KINDS, strict=True))}
        if report is not None:  # what torch promotes by itself is to be told, too
            names = {key: "promote" if name == "arithmetic" else name for key, name in names.items()}
        self.rules: dict[Any, Rule] = {
            key: RULES[name] if report is None else _reporting(RULES[name], report)
            for key, name in names.items()
        }


def listed_rules() -> dict[Any, str]:
    """The name of the rule of every listed function that this torch has."""
    return {function: rule for rows, rule in _LISTS for function in functions(rows)}


def traced_rule(func: Function, key: str | None) -> str:
    """The name of the rule of ``func`` in the table with this key, or an empty string.

    While :func:`torch.compile` traces, this replaces the lookup in a table: a dict of functions cannot be traced, so
    the compiler runs this function and treats its result as a constant.
    """
    return "" if key is None else _names(key).get(func, "")


# The mark that torch.compiler.assume_constant_result sets, without importing the compiler.
traced_rule._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _names(key: str) -> Mapping[Any, str]:
    names = listed_rules()
    for change in key.split():
        path, rule = change.split("=")
        names[function_at(path)] = rule
    return names


_SPELLED: Final = {
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
}


def _reporting(rule: Rule, report: Callable[[str], None]) -> Rule:
    """``rule``, with a line to ``report`` for every cast."""

    def reporting(scope: Casting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        @functools.wraps(func, updated=())
        def spy(*cast_args: Any, **cast_kwargs: Any) -> Any:
            for before, after in zip(tensors(args, kwargs), tensors(cast_args, cast_kwargs), strict=True):
                if before.dtype is not after.dtype:
                    report(f"{_SPELLED[before.dtype]}->{_SPELLED[after.dtype]} ({func.__name__})")
            return func(*cast_args, **cast_kwargs)

        return rule(scope, spy, args, kwargs)

    return reporting
