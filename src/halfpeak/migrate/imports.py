"""ImportRewrite: the change of one import statement at its place, so that its comments and its block stay.

libcst's ``AddImportsVisitor`` adds imports only at the top of a file; old imports may be in a function or a ``try``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import libcst as cst

from halfpeak.migrate.edits import Edit
from halfpeak.migrate.tree import Import, Tree, walk


class ImportedName(NamedTuple):
    """``import module as local``; if ``name`` is given, ``from module import name as local``."""

    module: str
    name: str | None = None
    local: str | None = None

    @property
    def clause(self) -> str:
        """What is written after ``import``."""
        name = self.name or self.module
        return name if self.local in (None, name) else f"{name} as {self.local}"


class ImportRewrite:
    """The change of one import statement. Names that are not replaced stay in it; new statements come with it."""

    def __init__(self, tree: Tree, statement: Import) -> None:
        assert not isinstance(statement.names, cst.ImportStar)
        self._tree, self._statement = tree, statement
        self._aliases: Sequence[cst.ImportAlias] = statement.names
        self._new: dict[cst.ImportAlias, ImportedName | None] = {}
        self._more: list[ImportedName] = []

    def replace(self, alias: cst.ImportAlias, name: ImportedName | None) -> None:
        """Import ``name`` instead of ``alias``."""
        self._new[alias] = name

    def add(self, name: ImportedName) -> None:
        """Import a further name."""
        self._more.append(name)

    def edits(self) -> list[Edit]:
        """The edits of the statement and its line."""
        if not self._new and not self._more:
            return []
        tree, statement = self._tree, self._statement
        in_place = self._in_place()
        indent = tree.indent(statement)
        separator = "; " if indent is None else f"{tree.module.default_newline}{indent}"
        names = self._names(in_place)
        texts = _statements(one for one in names if not self._is_bound(one))
        kept = [tree.text(alias) for alias in self._aliases if alias not in self._new]
        if in_place:
            start, _ = tree.span(statement)
            return [*(Edit(start, start, f"{text}{separator}") for text in texts), *in_place]
        if kept:
            texts.insert(0, f"{self._head()} {', '.join(kept)}")
        if not texts:
            if indent is not None and not self._is_alone():
                return [tree.without_line(statement)]
            texts = _statements(names[:1])
        comments = [one.value for one in walk(statement) if isinstance(one, cst.Comment)]
        return [tree.replaced(statement, separator.join((*(comments if indent is not None else ()), *texts)))]

    def _head(self) -> str:
        if isinstance(self._statement, cst.Import) or self._statement.module is None:
            return "import"
        return f"from {self._tree.text(self._statement.module)} import"

    def _names(self, in_place: Sequence[Edit]) -> list[ImportedName]:
        """The names to import by new statements."""
        replaced = () if in_place else map(self._new.get, self._aliases)
        already = self._new.values() if in_place else ()
        return [one for one in (*replaced, *self._more) if one is not None and one not in already]

    def _is_bound(self, name: ImportedName) -> bool:
        """Whether another statement imports a name already, as most files import ``torch``."""
        is_plain = name in (ImportedName("torch"), ImportedName("halfpeak"))
        return is_plain and self._tree.binds(name.module, self._statement)

    def _is_alone(self) -> bool:
        """Whether the statement is the only one of its block."""
        line = self._tree.parent(self._statement)
        block = None if line is None else self._tree.parent(line)
        return isinstance(block, cst.IndentedBlock) and len(block.body) == 1

    def _in_place(self) -> list[Edit]:
        """The edits that keep the statement and comments between its names; empty if more changes than one module."""
        statement, new = self._statement, [self._new.get(alias) for alias in self._aliases]
        names = [one for one in new if one is not None and one.name is not None]
        if not isinstance(statement, cst.ImportFrom) or statement.module is None or len(names) < len(new):
            return []
        if len({one.module for one in names}) > 1:
            return []
        edits = [self._tree.replaced(statement.module, names[0].module)]
        for alias, one in zip(self._aliases, names, strict=True):
            if alias.evaluated_name != one.name:
                edits.append(self._tree.replaced(alias, one.clause))
        return edits


def _statements(names: Iterable[ImportedName]) -> list[str]:
    """The statements that import names, one for each module."""
    plain: dict[str, None] = {}
    grouped: dict[str, dict[str, None]] = {}
    for one in names:
        if one.name is None:
            plain[f"import {one.clause}"] = None
        else:
            grouped.setdefault(one.module, {})[one.clause] = None
    return [*plain, *(f"from {module} import {', '.join(clauses)}" for module, clauses in grouped.items())]
