"""forward_ranges: finds the statements of a block that compute a loss, by a backward slice from the loss expression."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import libcst as cst

from halfpeak.migrate.tree import names_in, walk

# fmt: off
_NEVER_CAST: Final = frozenset({
    "to", "cuda", "cpu", "long", "int", "float", "bool", "type", "size", "detach",
    "clone", "pin_memory", "numpy", "item", "tuple", "list", "dict", "next", "iter", "len",
    "range", "enumerate", "print", "isinstance", "items", "keys", "values", "get", "time", "device",
    "Variable", "from_numpy", "fill_", "randn", "rand", "randint", "zeros", "ones", "full", "empty",
    "arange", "randn_like", "rand_like", "zeros_like", "ones_like", "full_like",
})
# fmt: on
"""Functions and methods whose results do not depend on a cast of operations."""


def forward_ranges(
    body: Sequence[cst.CSTNode], losses: Iterable[tuple[int, cst.BaseExpression]], barriers: Iterable[int]
) -> list[tuple[int, int]]:
    """The ranges of statements in a block that compute the losses, as pairs of first and last index.

    Args:
        losses: the index of each backward pass, and its loss.
        barriers: indices of statements that no range may contain: backward passes and steps.
    """
    wanted: set[int] = set()
    for index, loss in losses:
        wanted |= _slice(body, index, loss)
    ends = sorted({*barriers, len(body)})
    ranges: list[tuple[int, int]] = []
    start = 0
    for end in ends:
        inside = [number for number in sorted(wanted) if start <= number < end and computes(body[number])]
        if inside:
            ranges.append((inside[0], inside[-1]))
        start = end + 1
    return ranges


def computes(node: cst.CSTNode) -> bool:
    """Whether a statement or an expression calls a function whose result a cast could change.

    >>> computes(cst.parse_expression("batch.to(device)")), computes(cst.parse_expression("model(batch)"))
    (False, True)
    """
    return any(_called(one) not in _NEVER_CAST for one in walk(node) if isinstance(one, cst.Call))


def names_read(node: cst.CSTNode) -> set[str]:
    """The names in a node, as text, without names of attributes and of keyword arguments."""
    return {name.value for name in names_in(node)}


def _slice(body: Sequence[cst.CSTNode], end: int, loss: cst.BaseExpression) -> set[int]:
    needed = names_read(loss)
    found: set[int] = set()
    for index in range(end - 1, -1, -1):
        if needed & set(_bound(body[index])):
            found.add(index)
            needed |= names_read(body[index])
    return found


def _bound(statement: cst.CSTNode) -> Iterator[str]:
    """The names that a statement assigns, or whose objects it changes by a method, an index or an attribute."""
    for node in walk(statement):
        if isinstance(
            node, cst.AssignTarget | cst.AugAssign | cst.AnnAssign | cst.For | cst.NamedExpr | cst.CompFor
        ):
            yield from names_read(node.target)
        elif isinstance(node, cst.AsName):
            yield from names_read(node.name)
        elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            method = node.func.attr.value
            if method in ("append", "extend", "update", "insert") or method.endswith("_"):
                yield from names_read(node.func.value)


def _called(call: cst.Call) -> str:
    if isinstance(call.func, cst.Attribute):
        return call.func.attr.value
    return call.func.value if isinstance(call.func, cst.Name) else ""
