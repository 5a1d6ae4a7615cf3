"""Tree: the syntax tree of a file, the places of its nodes in the text, and all uses of imported names.

libcst's ``QualifiedNameProvider`` gives only the qualified name of a use; ``Tree`` also finds the imports that may have
bound it, and other assignments that may have replaced it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    Assignment,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    ScopeProvider,
)

from halfpeak.migrate.edits import Edit

Import = cst.Import | cst.ImportFrom


@dataclass(frozen=True, eq=False, slots=True)
class Alias:
    """One name that an import statement binds.

    Attributes:
        node: the alias in the statement.
        statement: the import statement.
        local: the name that it binds.
        name: the qualified name of ``local``: ``apex`` for ``import apex.amp``.
        full: the imported module or name: ``apex.amp`` for ``import apex.amp``.
    """

    node: cst.ImportAlias
    statement: Import
    local: str
    name: str
    full: str


@dataclass(frozen=True, eq=False, slots=True)
class Use:
    """One place where an imported name is read.

    Attributes:
        chain: for the expression ``a.b.c``, the nodes ``a``, ``a.b`` and ``a.b.c``, each with its qualified name.
        aliases: the imports that may have bound the name.
        doubt: why the qualified name may be wrong; empty if it is certain.
    """

    chain: tuple[tuple[cst.BaseExpression, str], ...]
    aliases: tuple[Alias, ...]
    doubt: str

    @property
    def name(self) -> str:
        """The qualified name of the whole chain."""
        return self.chain[-1][1]

    @property
    def node(self) -> cst.BaseExpression:
        """The whole chain."""
        return self.chain[-1][0]


class Tree:
    """A parsed file with the text, parents and scopes of its nodes.

    Attributes:
        module: the syntax tree.
        code: the text of the file.
        aliases: every name that an absolute import binds.
    """

    def __init__(self, module: cst.Module) -> None:
        self._wrapper = MetadataWrapper(module)
        self.module = self._wrapper.module
        self.code = module.code
        self._lines = [0, *(newline.end() for newline in re.finditer(r"\r\n?|\n", self.code))]
        self._positions = self._wrapper.resolve(PositionProvider)
        self._parents: Mapping[cst.CSTNode, cst.CSTNode] = self._wrapper.resolve(ParentNodeProvider)
        self._scopes = self._wrapper.resolve(ScopeProvider)
        self.aliases = list(self._read_aliases(self.module))

    def line(self, node: cst.CSTNode) -> int:
        """The number of the line in which a node begins."""
        return self._positions[node].start.line

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """The start and the end of a node in the text, without parentheses around it and a comma after it."""
        place = self._positions[node]
        start, end = (self._lines[at.line - 1] + at.column for at in (place.start, place.end))
        return start, end

    def text(self, node: cst.CSTNode) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.code[start:end]

    def replaced(self, node: cst.CSTNode, new: str) -> Edit:
        """The edit that writes ``new`` for a node."""
        return Edit(*self.span(node), new)

    def without_line(self, node: cst.CSTNode) -> Edit:
        """The edit that removes a statement that is alone on its lines; a comment behind it stays."""
        start, end = self.span(node)
        line = self.line(node)
        rest = self.code[end : self._line_end(end)]
        if rest.lstrip().startswith("#"):
            return Edit(start, end + len(rest) - len(rest.lstrip()), "")
        return Edit(self._lines[line - 1], self._line_end(end), "")

    def indent(self, node: cst.CSTNode) -> str | None:
        """The white space before a statement; None if other code is on its line."""
        line = self.parent(node)
        if not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
            return None
        return self.code[self._lines[self.line(node) - 1] : self.span(node)[0]]

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The parent of a node."""
        return self._parents.get(node)

    def parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The ancestors of a node, the innermost first."""
        while (above := self._parents.get(node)) is not None:
            yield above
            node = above

    def call_of(self, node: cst.CSTNode) -> cst.Call | None:
        """The call whose function is this node; None if the node is not called."""
        above = self.parent(node)
        return above if isinstance(above, cst.Call) and above.func is node else None

    def binds(self, name: str, node: cst.CSTNode) -> bool:
        """Whether ``import name`` is visible in the scope of a node."""
        scope = self._scopes.get(node)
        return scope is not None and any(
            isinstance(one, ImportAssignment)
            and isinstance(one.node, cst.Import)
            and any(alias.evaluated_name == name and alias.asname is None for alias in one.node.names)
            for one in scope[name]
        )

    def is_fallback(self, alias: Alias) -> bool:
        """Whether an import runs only if another import of the same name has failed."""
        scope = self._scopes.get(alias.statement)
        is_handled = any(isinstance(above, cst.ExceptHandler) for above in self.parents(alias.statement))
        return is_handled and scope is not None and len(list(scope[alias.local])) > 1

    @cached_property
    def uses(self) -> list[Use]:
        """Every place where an imported name is read, in the order of the file."""
        known = {(id(alias.statement), name): alias for alias in self.aliases for name in _bound(alias.node)}
        found: dict[int, Use] = {}
        for scope in {id(scope): scope for scope in self._scopes.values() if scope is not None}.values():
            for access in scope.accesses:
                root = _root(access.node)
                referents = list(access.referents)
                aliases = [
                    known.get((id(one.node), one.name))
                    for one in referents
                    if isinstance(one, ImportAssignment)
                ]
                ours = tuple(alias for alias in aliases if alias is not None)
                if root is not None and ours and id(root) not in found:
                    others = [one for one in referents if not isinstance(one, ImportAssignment)]
                    doubt = "" if len(ours) == len(aliases) else "it may come from another import"
                    doubt = doubt or self._doubt(ours, others)
                    found[id(root)] = Use(self._chain(root, ours[0].name), ours, doubt)
        return sorted(found.values(), key=lambda use: self.span(use.chain[0][0]))

    def _line_end(self, place: int) -> int:
        """The end of the line that contains a place, with its newline."""
        return next((start for start in self._lines if start > place), len(self.code))

    def _chain(self, root: cst.Name, name: str) -> tuple[tuple[cst.BaseExpression, str], ...]:
        links: list[tuple[cst.BaseExpression, str]] = [(root, name)]
        above = self.parent(root)
        while isinstance(above, cst.Attribute) and above.value is links[-1][0]:
            links.append((above, f"{links[-1][1]}.{above.attr.value}"))
            above = self.parent(above)
        return tuple(links)

    def _doubt(self, aliases: tuple[Alias, ...], others: Sequence[object]) -> str:
        if len({alias.name for alias in aliases}) > 1:
            return f"it may be {' or '.join(sorted({alias.name for alias in aliases}))}"
        for other in others:
            if not isinstance(other, Assignment) or not self._is_absence(other.node):
                return f"{aliases[0].local} is also given another value"
        return ""

    def _is_absence(self, node: cst.CSTNode) -> bool:
        """Whether a name is set to None or False, as in ``except ImportError: amp = None``."""
        for above in self.parents(node):
            match above:
                case cst.Assign(value=cst.Name(value="None" | "False")):
                    return True
                case cst.Assign() | cst.BaseStatement():
                    return False
                case _:
                    pass
        return False

    def _read_aliases(self, module: cst.Module) -> Iterator[Alias]:
        for node in walk(module):
            if isinstance(node, cst.Import):
                for alias in node.names:
                    full, local = alias.evaluated_name, alias.evaluated_alias
                    package = full.partition(".")[0]
                    yield Alias(alias, node, local or package, full if local else package, full)
            elif (
                isinstance(node, cst.ImportFrom)
                and not node.relative
                and not isinstance(node.names, cst.ImportStar)
            ):
                origin = get_full_name_for_node(node.module) if node.module is not None else None
                for alias in node.names if origin else ():
                    full = f"{origin}.{alias.evaluated_name}"
                    yield Alias(alias, node, alias.evaluated_alias or alias.evaluated_name, full, full)


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all of its descendants, in the order of the text."""
    yield node
    for child in node.children:
        yield from walk(child)


def _bound(alias: cst.ImportAlias) -> list[str]:
    """The names under which libcst stores an alias's assignments: ``a``, ``a.b``, ``a.b.c`` for ``import a.b.c``."""
    if alias.evaluated_alias:
        return [alias.evaluated_alias]
    parts = alias.evaluated_name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _root(node: cst.CSTNode) -> cst.Name | None:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node if isinstance(node, cst.Name) else None
