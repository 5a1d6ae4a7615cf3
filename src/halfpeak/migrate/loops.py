"""What the rewritings of a training loop share: lines that keep their comments, wrapped blocks, imports that go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import libcst as cst

from halfpeak.migrate.edits import Edits
from halfpeak.migrate.forward import computes, forward_ranges
from halfpeak.migrate.imports import Entry, Imports, place
from halfpeak.migrate.training import Block, Training, Unsure
from halfpeak.migrate.tree import Alias, Import, Tree


def line(text: str) -> cst.SimpleStatementLine:
    """A line of code."""
    parsed = cst.parse_statement(text)
    assert isinstance(parsed, cst.SimpleStatementLine)
    return parsed


def same_line(*texts: str) -> Callable[[cst.SimpleStatementLine], list[cst.SimpleStatementLine]]:
    """Other statements in the place of a line; the first keeps its comments."""

    def change(updated: cst.SimpleStatementLine) -> list[cst.SimpleStatementLine]:
        lines = [line(text) for text in texts]
        ends = {"leading_lines": updated.leading_lines, "trailing_whitespace": updated.trailing_whitespace}
        return [lines[0].with_changes(**ends), *lines[1:]] if lines else []

    return change


def in_place_of(old: cst.With | cst.SimpleStatementLine, *texts: str) -> Callable[[Any], list[Any]]:
    """Other statements in the place of a block, whose comments are all kept."""

    def change(updated: Any) -> list[Any]:
        first, *others = [cst.parse_statement(text) for text in texts]
        return [first.with_changes(leading_lines=[*updated.leading_lines, *_comments_in(updated)]), *others]

    return change


def _comments_in(node: Any) -> list[cst.EmptyLine]:
    """The comments after the head of a block and around its lines, or at the end of a line."""
    if isinstance(node, cst.SimpleStatementLine):
        ends, lines = [node.trailing_whitespace], list[cst.EmptyLine]()
    elif isinstance(node.body, cst.SimpleStatementSuite):
        ends, lines = [node.body.trailing_whitespace], list[cst.EmptyLine]()
    else:
        inner = node.body.body[0]
        lines = [one for one in (*inner.leading_lines, *node.body.footer) if one.comment is not None]
        ends = [node.body.header, inner.trailing_whitespace]
    return [
        cst.EmptyLine(comment=one.comment)
        for one in (*ends[:1], *lines, *ends[1:])
        if one.comment is not None
    ]


def wrap_forward(edits: Edits, training: Training, block: Block, context: str, *, required: bool) -> None:
    """Put what computes the losses of a block into a context.

    Args:
        required: the context changes what is computed, so it must be known what belongs inside.
    """
    passes = [one for one in training.passes if one.block is block]
    barriers = [one.index for one in passes] + [one.index for one in training.steps if one.block is block]
    losses = [(one.index, one.loss) for one in passes]
    ranges = forward_ranges(block.body, losses, barriers)
    if required:
        for index, loss in losses:
            if not any(computes(one) for one in block.body[:index]) or not forward_ranges(
                block.body, [(index, loss)], barriers
            ):
                raise Unsure(loss, "amp.scale_loss", "the loss is computed elsewhere", "keep halfpeak.amp")
    if ranges:
        edits.block(block, lambda lists: _wrapped(lists, ranges, context))


def _wrapped(lists: list[list[Any]], ranges: Sequence[tuple[int, int]], context: str) -> list[Any]:
    body: list[Any] = []
    starts = dict(ranges)
    index = 0
    while index < len(lists):
        last = starts.get(index)
        if last is None:
            body += lists[index]
            index += 1
            continue
        inside = [statement for some in lists[index : last + 1] for statement in some]
        leading = inside[0].leading_lines
        inside[0] = inside[0].with_changes(leading_lines=[])
        item = cst.WithItem(cst.parse_expression(context))
        body.append(cst.With([item], cst.IndentedBlock(inside), leading_lines=leading))
        index = last + 1
    return body


def drop_imports(
    tree: Tree, training: Training, edits: Edits, entries: Sequence[Entry], *, kept: Collection[str]
) -> None:
    """Import other things in the place of amp, as far as the rewritten code does not use it any more.

    Args:
        entries: what the rewritten code needs.
        kept: names of amp that it still uses.
    """
    gone = {use for name, uses in training.uses.items() if name not in kept for use in uses}
    home = training.initialize.use.aliases
    scopes = {use.scope for use in gone}
    placed: dict[Import, Imports] = {}
    for alias in tree.aliases:
        uses = [use for use in tree.uses if alias in use.aliases]
        if not any(use in gone for use in uses):
            continue
        imports = placed.setdefault(alias.statement, Imports(alias.statement))
        if all(use in gone for use in uses):
            imports.replace(alias.node, entries if alias in home else [])
        elif alias in home:
            for entry in entries:
                imports.also(entry)
        _check_reach(tree, alias, home, entries, scopes)
    for statement, imports in placed.items():
        if imports.has_changed:
            place(tree, edits, statement, imports)


def _check_reach(
    tree: Tree, alias: Alias, home: tuple[Alias, ...], entries: Sequence[Entry], scopes: Collection[Any]
) -> None:
    """A second import, beside the engine's own, must be seen by all that used the old one."""
    function = tree.function(alias.statement)
    if alias in home and len(entries) > 1 and function is not None and len(scopes) > 1:
        raise Unsure(
            alias.statement,
            alias.full,
            "it is imported inside a function",
            "import it at the top of the file",
        )
