"""Edits: changes of a syntax tree that are collected first and then made in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst

Statement = cst.BaseStatement | cst.BaseSmallStatement
NodeChange = Callable[[Any], Any]
StatementChange = Callable[[Any], Sequence[Any]]
BlockChange = Callable[[list[list[Any]]], list[Any]]


class Edits(cst.CSTTransformer):
    """Changes by node identity. A change is called with its node after the changes of the nodes inside it."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[cst.CSTNode, NodeChange] = {}
        self._statements: dict[cst.CSTNode, StatementChange] = {}
        self._blocks: dict[cst.CSTNode, BlockChange] = {}

    def made_in(self, module: cst.Module) -> cst.Module:
        """The module with all changes."""
        changed = module.visit(self)
        assert isinstance(changed, cst.Module)
        return changed

    def code(self, node: cst.CSTNode) -> str:
        """The source code of a node with the changes inside it so far."""
        changed = node.visit(self)
        assert isinstance(changed, cst.CSTNode)
        return cst.Module([]).code_for_node(changed)

    def replace(self, node: cst.CSTNode, change: NodeChange) -> None:
        """Replace a node that is no statement by another node of its kind."""
        self._nodes[node] = change

    def respell(self, node: cst.BaseExpression, code: str) -> None:
        """Replace an expression by other code."""
        self.replace(node, lambda updated: cst.parse_expression(code))

    def pending(self, node: cst.CSTNode) -> NodeChange:
        """The change that is registered for a node; if none is, the identity."""
        return self._nodes.get(node, lambda updated: updated)

    def statement(self, node: Statement, change: StatementChange) -> None:
        """Replace a line, or one statement of a line with semicolons, by any number of statements."""
        self._statements[node] = change

    def block(self, node: cst.CSTNode, change: BlockChange) -> None:
        """Make a block of its statements, each of which is already a list of new statements."""
        self._blocks[node] = change

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Called by libcst for each node, inner ones first."""
        if isinstance(original_node, (cst.Module, cst.IndentedBlock)):
            return self._leave_block(original_node, updated_node)
        if isinstance(original_node, (cst.SimpleStatementLine, cst.SimpleStatementSuite)):
            updated_node = self._leave_line(original_node, updated_node)
        change = self._nodes.get(original_node)
        return updated_node if change is None else change(updated_node)

    def _leave_line(self, original: Any, updated: Any) -> Any:
        if not any(small in self._statements for small in original.body):
            return updated
        parts: list[Any] = []
        for before, after in zip(original.body, updated.body, strict=True):
            change = self._statements.get(before)
            parts += [after] if change is None else change(after)
        parts = parts or [cst.Pass()]
        # A semicolon belongs to the statement before it; with DEFAULT, libcst adds the semicolons that are needed.
        return updated.with_changes(
            body=[part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for part in parts]
        )

    def _leave_block(self, original: Any, updated: Any) -> Any:
        if original not in self._blocks and not any(one in self._statements for one in original.body):
            return updated
        lists: list[list[Any]] = []
        waiting: list[cst.EmptyLine] = []
        for before, after in zip(original.body, updated.body, strict=True):
            change = self._statements.get(before)
            several = [after] if change is None else list(change(after))
            if not several:
                waiting += _lines_of(after)
            elif waiting:
                several[0] = several[0].with_changes(leading_lines=_joined(waiting, several[0].leading_lines))
                waiting = []
            lists.append(several)
        join = self._blocks.get(original)
        body = join(lists) if join is not None else [one for some in lists for one in some]
        if not body and isinstance(original, cst.IndentedBlock):
            body = [cst.SimpleStatementLine([cst.Pass()])]
        return updated.with_changes(body=body, footer=[*_comments(waiting), *updated.footer])


def parse_line(text: str) -> cst.SimpleStatementLine:
    """A line of code as a statement."""
    parsed = cst.parse_statement(text)
    assert isinstance(parsed, cst.SimpleStatementLine)
    return parsed


def in_place_of_line(
    old: cst.SimpleStatementLine, lines: Sequence[cst.SimpleStatementLine], lost: Sequence[cst.EmptyLine] = ()
) -> list[cst.SimpleStatementLine]:
    """The lines that replace ``old``: the first keeps the comments of ``old`` and gets ``lost`` above it."""
    if not lines:
        return []
    leading = [*old.leading_lines, *lost]
    first = lines[0].with_changes(leading_lines=leading, trailing_whitespace=old.trailing_whitespace)
    return [first, *lines[1:]]


def same_line(*texts: str) -> Callable[[cst.SimpleStatementLine], list[cst.SimpleStatementLine]]:
    """A change that replaces a line by other lines; the first keeps the comments."""
    lines = [parse_line(text) for text in texts]
    return lambda updated: in_place_of_line(updated, lines)


def in_place(*texts: str) -> Callable[[Any], list[Any]]:
    """A change that replaces a compound statement or a line by other statements, and keeps all comments."""

    def change(updated: Any) -> list[Any]:
        first, *others = [cst.parse_statement(text) for text in texts]
        return [
            first.with_changes(leading_lines=[*updated.leading_lines, *_inner_comments(updated)]),
            *others,
        ]

    return change


def _lines_of(removed: Any) -> list[cst.EmptyLine]:
    """The empty lines and comments of a statement that is removed."""
    ends = removed.trailing_whitespace if isinstance(removed, cst.SimpleStatementLine) else None
    own = [cst.EmptyLine(comment=ends.comment)] if ends is not None and ends.comment is not None else []
    return [*removed.leading_lines, *own]


def _joined(before: list[cst.EmptyLine], after: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """The lines above the second of two statements when the first is removed: the comments of both are kept."""
    comments = _comments(before)
    return [*comments, *after] if after or (comments and before[0].comment is not None) else before


def _comments(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    return [line for line in lines if line.comment is not None]


def _inner_comments(node: Any) -> list[cst.EmptyLine]:
    """The comments in a compound statement with one line in its body, or at the end of a line."""
    if isinstance(node, cst.SimpleStatementLine):
        places = [node.trailing_whitespace]
    elif isinstance(node.body, cst.SimpleStatementSuite):
        places = [node.body.trailing_whitespace]
    else:
        inner = node.body.body[0]
        places = [node.body.header, *inner.leading_lines, *node.body.footer, inner.trailing_whitespace]
    return [cst.EmptyLine(comment=place.comment) for place in places if place.comment is not None]
