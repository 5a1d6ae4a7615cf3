"""ImportRewrite: the change of one import statement at its place, so that its comments and its block stay.

libcst's ``AddImportsVisitor`` adds imports only at the top of a file; old imports may be in a function or a ``try``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import Final, NamedTuple

import libcst as cst

from halfpeak.migrate.edits import Edits, in_place_of_line, parse_line
from halfpeak.migrate.tree import Alias, Import, Tree, Use, walk


class ImportedName(NamedTuple):
    """``import module as local``; if ``name`` is given, ``from module import name as local``."""

    module: str
    name: str | None = None
    local: str | None = None

    @property
    def clause(self) -> str:
        """The name in the list of a ``from`` import."""
        return f"{self.name}" if self.local in (None, self.name) else f"{self.name} as {self.local}"


class LoopImports(NamedTuple):
    """The changes of imports that a rewritten training loop needs.

    Attributes:
        gone: uses of amp that the rewritten loop no longer has.
        names: the names that it needs instead.
        where: the imports of amp that these names join or replace.
    """

    gone: Set[Use]
    names: Sequence[ImportedName]
    where: Sequence[Alias]


NO_LOOP: Final = LoopImports(frozenset(), (), ())
"""The value for a file in which no loop is rewritten."""


class ImportRewrite:
    """The change of one import statement. Names that are not replaced stay in it; new statements follow it."""

    def __init__(self, statement: Import) -> None:
        self._statement = statement
        self._new: dict[cst.ImportAlias, list[ImportedName]] = {}
        self._more: list[ImportedName] = []

    @property
    def has_changed(self) -> bool:
        """Whether the statement changes."""
        return bool(self._new or self._more)

    def replace(self, alias: cst.ImportAlias, names: Sequence[ImportedName]) -> None:
        """Import ``names`` instead of ``alias``."""
        self._new[alias] = list(names)

    def add(self, name: ImportedName) -> None:
        """Import a further name."""
        if name not in self._more:
            self._more.append(name)

    def lines(
        self, updated: cst.SimpleStatementLine, known: Collection[str]
    ) -> list[cst.SimpleStatementLine]:
        """The lines that replace the statement's line; its comments stay with the first.

        Args:
            updated: the line.
            known: modules that another import in the same scope binds already.
        """
        lines = [cst.SimpleStatementLine([part]) for part in self.parts(updated.body[0], known)]
        lost = [
            one for one in _comments(updated.body[0]) if not any(one in _comments(line) for line in lines)
        ]
        return in_place_of_line(updated, lines, [cst.EmptyLine(comment=cst.Comment(one)) for one in lost])

    def parts(self, updated: cst.BaseSmallStatement, known: Collection[str]) -> list[cst.BaseSmallStatement]:
        """The statements that replace this one."""
        kept = [alias for alias in self._aliases if alias not in self._new]
        entries = [entry for alias in self._aliases for entry in self._new.get(alias, ())]
        same = self._in_place(updated, entries) if not kept else None
        parts = [] if same is None else [same]
        more = [
            *({} if parts else dict.fromkeys(entries)),
            *(one for one in self._more if one not in entries),
        ]
        if kept:
            last = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            parts.append(updated.with_changes(names=[*kept[:-1], last]))
        new = [one for one in more if one.name or one.local or one.module not in known]
        return parts + [parse_line(text).body[0] for text in _statements(new)]

    @property
    def _aliases(self) -> Sequence[cst.ImportAlias]:
        names = self._statement.names
        assert not isinstance(names, cst.ImportStar)
        return names

    def _in_place(
        self, updated: cst.BaseSmallStatement, entries: list[ImportedName]
    ) -> cst.BaseSmallStatement | None:
        """The same statement with another module, which keeps comments between its names; None if more changes."""
        one_each = all(len(self._new[alias]) == 1 for alias in self._aliases)
        in_one_module = len({entry.module for entry in entries}) == 1
        if not (one_each and in_one_module and isinstance(updated, cst.ImportFrom)):
            return None
        names: list[cst.ImportAlias] = []
        for alias, entry in zip(self._aliases, entries, strict=True):
            if entry.name is None:
                return None
            if alias.evaluated_name != entry.name:
                asname = alias.asname
                if asname is None and entry.local not in (None, entry.name):
                    asname = cst.AsName(cst.Name(entry.local))
                alias = alias.with_changes(name=cst.Name(entry.name), asname=asname)
            names.append(alias)
        module = cst.parse_expression(entries[0].module)
        return updated.with_changes(module=module, names=names)


def place(tree: Tree, edits: Edits, statement: Import, imports: ImportRewrite) -> None:
    """Replace an import statement by its new statements."""
    where = tree.parent(statement)
    scope = tree.scope(statement)
    known = {name for name in ("torch", "halfpeak") if scope is not None and tree.binds(name, scope)}
    if not isinstance(where, cst.SimpleStatementLine) or len(where.body) > 1:
        edits.statement(statement, lambda updated: imports.parts(updated, known))
        return
    block = tree.parent(where)
    is_alone = isinstance(block, cst.IndentedBlock) and len(block.body) == 1
    edits.statement(where, lambda updated: imports.lines(updated, () if is_alone else known))


def _comments(node: cst.CSTNode) -> list[str]:
    return [one.value for one in walk(node) if isinstance(one, cst.Comment)]


def _statements(entries: Sequence[ImportedName]) -> list[str]:
    texts: list[str] = []
    grouped: dict[str, list[str]] = {}
    for entry in entries:
        if entry.name is not None:
            grouped.setdefault(entry.module, []).append(entry.clause)
            continue
        is_plain = entry.local in (None, entry.module)
        text = f"import {entry.module}" if is_plain else f"import {entry.module} as {entry.local}"
        texts += [text] if text not in texts else []
    return texts + [
        f"from {module} import {', '.join(dict.fromkeys(names))}" for module, names in grouped.items()
    ]
