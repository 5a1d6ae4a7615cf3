"""The package as text and syntax trees, for the laws that read the source instead of running it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "halfpeak"


@dataclass(frozen=True)
class Module:
    """One file of the package: ``halfpeak.core.dtypes``, its package ``core``, its text and its tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The package of halfpeak that it lives in; empty for the files at the top."""
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else ""

    @property
    def where(self) -> str:
        """Its path inside the package, as the lists of exceptions write it."""
        return self.path.relative_to(PACKAGE).as_posix()

    def at(self, node: ast.AST) -> str:
        """Path and line of a node, as editors link them."""
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@cache
def modules() -> tuple[Module, ...]:
    """Every file of the package."""
    found: list[Module] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        found.append(Module(name, path, text, ast.parse(text, filename=str(path))))
    return tuple(found)


def imports(module: Module) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement with the full name of what it reaches, wherever it stands in the file.

    A name taken from a module of this package counts as that module; one from another package stays whole.
    """
    names = {other.name for other in modules()}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node, base if base in names and inner not in names else inner


def for_types_only(module: Module) -> set[ast.AST]:
    """The nodes under ``if TYPE_CHECKING``, which never run."""
    guards = (
        n for n in ast.walk(module.tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    )
    return {node for guard in guards for statement in guard.body for node in ast.walk(statement)}


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.name.split(".")
    if module.path.name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def require_none(found: Iterable[str], remedy: str) -> None:
    """Fail with every place that breaks a law, and with the remedy."""
    places = list(found)
    assert not places, "\n".join([*places, "", f"What to do: {remedy}"])


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
