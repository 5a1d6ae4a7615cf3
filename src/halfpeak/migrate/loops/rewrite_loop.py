"""Edits that ``to_engine`` and ``to_autocast`` share: statements with their comments, wrapped blocks, imports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any

import libcst as cst

from halfpeak.migrate.edits import Edits, in_place_of_line, parse_line
from halfpeak.migrate.findings import NotSupported
from halfpeak.migrate.imports import ImportedName, LoopImports
from halfpeak.migrate.loops.loop_match import BackwardPass, Block, LoopMatch
from halfpeak.migrate.loops.loss_expr import computes, forward_ranges
from halfpeak.migrate.tree import Tree


def same_line(*texts: str) -> Callable[[cst.SimpleStatementLine], list[cst.SimpleStatementLine]]:
    """A change that replaces a line by other lines; the first keeps the comments."""
    lines = [parse_line(text) for text in texts]
    return lambda updated: in_place_of_line(updated, lines)


def in_place(*texts: str) -> Callable[[Any], list[Any]]:
    """A change that replaces a compound statement or a line by other statements, and keeps all comments."""

    def change(updated: Any) -> list[Any]:
        first, *others = [cst.parse_statement(text) for text in texts]
        return [first.with_changes(leading_lines=[*updated.leading_lines, *_comments_in(updated)]), *others]

    return change


def _comments_in(node: Any) -> list[cst.EmptyLine]:
    """The comments in a compound statement with one line in its body, or at the end of a line."""
    if isinstance(node, cst.SimpleStatementLine):
        places = [node.trailing_whitespace]
    elif isinstance(node.body, cst.SimpleStatementSuite):
        places = [node.body.trailing_whitespace]
    else:
        inner = node.body.body[0]
        places = [node.body.header, *inner.leading_lines, *node.body.footer, inner.trailing_whitespace]
    return [cst.EmptyLine(comment=place.comment) for place in places if place.comment is not None]


def require_named_loss(one: BackwardPass) -> None:
    """Check that a statement of its own computes the loss, so that it can be moved into the context with casts.

    Raises:
        NotSupported: the loss is computed in the head of ``with amp.scale_loss(...)``.
    """
    if computes(one.loss):
        reason = "the loss is computed in the with statement itself"
        raise NotSupported(
            one.loss, "amp.scale_loss", reason, "compute it in a line before, and give it a name"
        )


def wrap_forward(edits: Edits, match: LoopMatch, block: Block, context: str, *, required: bool) -> None:
    """Put the statements of a block that compute its losses into ``with context:``.

    Args:
        required: whether the context changes results; if so, a loss that is computed elsewhere is not supported.
    """
    passes = [one for one in match.passes if one.block is block]
    barriers = [one.index for one in passes] + [one.index for one in match.steps if one.block is block]
    losses = [(one.index, one.loss) for one in passes]
    ranges = forward_ranges(block.body, losses, barriers)
    if required:
        for index, loss in losses:
            if not any(computes(one) for one in block.body[:index]) or not forward_ranges(
                block.body, [(index, loss)], barriers
            ):
                raise NotSupported(
                    loss, "amp.scale_loss", "the loss is computed elsewhere", "keep halfpeak.amp"
                )
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


def imports_for(
    tree: Tree, match: LoopMatch, names: Sequence[ImportedName], *, kept: Collection[str]
) -> LoopImports:
    """The imports of other names in the place of amp, which stays imported if the rewritten code still uses it.

    Args:
        names: the names that the rewritten code needs.
        kept: the names of amp that the rewritten code still uses.

    Raises:
        NotSupported: amp is imported in a function, so other code that needs the new names would not see them.
    """
    gone = {use for name, uses in match.uses.items() if name not in kept for use in uses}
    where = match.initialize.use.aliases
    for alias in where if len(names) > 1 and len({use.scope for use in gone}) > 1 else ():
        if tree.function(alias.statement) is not None:
            reason = "it is imported inside a function"
            raise NotSupported(alias.statement, alias.full, reason, "import it at the top of the file")
    return LoopImports(gone, names, where)
