"""wrap_forward: puts the statements that compute a loss into a context; a backward slice from the loss finds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

import libcst as cst

from halfpeak.migrate.edits import Edits
from halfpeak.migrate.findings import NotSupported
from halfpeak.migrate.loops.loop_match import BackwardPass, Block, LoopMatch
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


def require_named_loss(one: BackwardPass) -> None:
    """Check that a statement of its own computes the loss, so that it can be moved into the context with casts.

    Raises:
        NotSupported: the loss is computed in the head of ``with amp.scale_loss(...)``.
    """
    if _computes(one.loss):
        reason = "the loss is computed in the with statement itself"
        raise NotSupported(
            one.loss, "amp.scale_loss", reason, "compute it in a line before, and give it a name"
        )


def wrap_forward(edits: Edits, match: LoopMatch, block: Block, context: str, *, required: bool) -> None:
    """Put the statements of a block that compute its losses into ``with context:``.

    Args:
        required: whether the context changes results; if so, a loss that is computed elsewhere is not supported.
    """
    barriers = {one.index for one in (*match.passes, *match.steps) if one.block is block}
    wanted: set[int] = set()
    for one in (one for one in match.passes if one.block is block):
        found = _slice(block.body, one.index, one.loss)
        if required and not _ranges(block.body, found, barriers):
            reason = "the loss is computed elsewhere"
            raise NotSupported(one.loss, "amp.scale_loss", reason, "keep halfpeak.amp")
        wanted |= found
    ranges = _ranges(block.body, wanted, barriers)
    if ranges:
        edits.block(block, lambda lists: _wrapped(lists, ranges, context))


def _wrapped(lists: list[list[Any]], ranges: Sequence[tuple[int, int]], context: str) -> list[Any]:
    body: list[Any] = []
    end = 0
    for first, last in ranges:
        body += chain.from_iterable(lists[end:first])
        end = last + 1
        inside = list(chain.from_iterable(lists[first:end]))
        leading = inside[0].leading_lines
        inside[0] = inside[0].with_changes(leading_lines=[])
        item = cst.WithItem(cst.parse_expression(context))
        body.append(cst.With([item], cst.IndentedBlock(inside), leading_lines=leading))
    return [*body, *chain.from_iterable(lists[end:])]


def _ranges(body: Sequence[cst.CSTNode], wanted: set[int], barriers: set[int]) -> list[tuple[int, int]]:
    """The ranges of wanted statements that compute something, as pairs of first and last index.

    Args:
        barriers: indices of statements that no range may contain: backward passes and steps.
    """
    ranges: list[tuple[int, int]] = []
    start = 0
    for end in sorted({*barriers, len(body)}):
        inside = [number for number in sorted(wanted) if start <= number < end and _computes(body[number])]
        if inside:
            ranges.append((inside[0], inside[-1]))
        start = end + 1
    return ranges


def _computes(node: cst.CSTNode) -> bool:
    """Whether a statement or an expression calls a function whose result a cast could change.

    >>> _computes(cst.parse_expression("batch.to(device)")), _computes(cst.parse_expression("model(batch)"))
    (False, True)
    """
    return any(_called(one) not in _NEVER_CAST for one in walk(node) if isinstance(one, cst.Call))


def _names_read(node: cst.CSTNode) -> set[str]:
    """The names in a node, as text, without names of attributes and of keyword arguments."""
    return {name.value for name in names_in(node)}


def _slice(body: Sequence[cst.CSTNode], end: int, loss: cst.BaseExpression) -> set[int]:
    """The indices of the statements before ``end`` on which the loss depends."""
    needed = _names_read(loss)
    found: set[int] = set()
    for index in range(end - 1, -1, -1):
        if needed & set(_bound(body[index])):
            found.add(index)
            needed |= _names_read(body[index])
    return found


def _bound(statement: cst.CSTNode) -> Iterator[str]:
    """The names that a statement assigns, or whose objects it changes by a method, an index or an attribute."""
    for node in walk(statement):
        if isinstance(
            node, cst.AssignTarget | cst.AugAssign | cst.AnnAssign | cst.For | cst.NamedExpr | cst.CompFor
        ):
            yield from _names_read(node.target)
        elif isinstance(node, cst.AsName):
            yield from _names_read(node.name)
        elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            method = node.func.attr.value
            if method in ("append", "extend", "update", "insert") or method.endswith("_"):
                yield from _names_read(node.func.value)


def _called(call: cst.Call) -> str:
    if isinstance(call.func, cst.Attribute):
        return call.func.attr.value
    return call.func.value if isinstance(call.func, cst.Name) else ""
