"""Names, signatures and attributes of the originals, read from their source without running it.

``python tests/compat/facts.py PATH/TO/mmcv-1.7.2`` rewrites ``mmcv.csv``, which holds only names and signatures.
"""

from __future__ import annotations

import ast
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
MMCV = ("optimizer/builder", "optimizer/default_constructor", "hooks/optimizer", "fp16_utils", "dist_utils")
MMENGINE = (
    "base",
    "optimizer_wrapper",
    "amp_optimizer_wrapper",
    "apex_optimizer_wrapper",
    "optimizer_wrapper_dict",
    "builder",
    "default_constructor",
    "zero_optimizer",
)
KNOWN_PRIVATE = (
    "_accumulative_counts",
    "_clip_grad",
    "_inner_count",
    "_max_counts",
    "_remainder_counts",
    "_scale_update_param",
)
"""Private names that code outside of the original is known to use."""

Facts = dict[str, str]
"""A name, such as ``OptimWrapper.step`` -> its signature; empty for an attribute, a property or a constant."""


def facts(source: str) -> Facts:
    """The public names of a module. If it defines a name twice, for different releases of torch, the first counts."""
    found: Facts = {}
    for node in _statements(ast.parse(source).body):
        for name, signature in _of(node):
            found.setdefault(name, signature)
    return found


def read(path: Path) -> Facts:
    """A table that was written by :func:`write`."""
    with path.open(newline="") as file:
        return dict(csv.reader(file))


def write(path: Path, table: Facts) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(table.items())


def of_files(folder: Path, names: tuple[str, ...]) -> Facts:
    found: Facts = {}
    for name in names:
        found = {**facts((folder / f"{name}.py").read_text()), **found}
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        else:
            yield node


def _of(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
        yield node.name, _signature(node)
    elif (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id.isupper()
    ):
        yield node.targets[0].id, ""
    elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        yield from _of_class(node)


def _of_class(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    methods = [one for one in _statements(node.body) if isinstance(one, ast.FunctionDef)]
    made = [one for one in methods if one.name == "__init__"]
    yield node.name, _signature(made[0]) if made else ""
    for method in methods:
        if _is_known(method.name):
            yield f"{node.name}.{method.name}", "" if _is_property(method) else _signature(method)
    for method in methods:
        for one in ast.walk(method):
            targets = one.targets if isinstance(one, ast.Assign) else []
            for target in targets:
                is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
                if is_own and _is_known(target.attr):
                    yield f"{node.name}.{target.attr}", ""


def _is_known(name: str) -> bool:
    return not name.startswith("_") or name in KNOWN_PRIVATE


def _is_property(method: ast.FunctionDef) -> bool:
    return any(ast.unparse(one) == "property" for one in method.decorator_list)


def _signature(method: ast.FunctionDef) -> str:
    arguments = method.args
    if arguments.args and arguments.args[0].arg == "self":
        arguments = ast.arguments(**{**dict(ast.iter_fields(arguments)), "args": arguments.args[1:]})
    for one in (*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if one is not None:
            one.annotation = None
    return f"({ast.unparse(arguments)})"


if __name__ == "__main__":
    write(HERE / "mmcv.csv", of_files(Path(sys.argv[1]) / "mmcv" / "runner", MMCV))
