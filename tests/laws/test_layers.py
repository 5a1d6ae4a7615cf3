"""Imports go down the layers, never up, sideways between front ends, or in circles; also those for types only."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

from laws.source import PACKAGE, Module, functions, imports, modules, require_none

LAYER = {
    "core": 0,
    "ops": 1,
    "casting": 2,
    "fused": 2,
    "checkpoint": 2,
    "distributed": 3,
    "parts": 4,
    "engine": 5,
    "diagnosis": 5,
    "amp": 6,
    "optim": 6,
    "runner": 6,
    "insight": 7,
    "integrations": 7,
    "migrate": 7,
    "recipes": 7,
    "cli": 8,
    "shim": 8,
}

TOP = LAYER["engine"]
"""The layer of ``import halfpeak`` itself, which re-exports names of all layers up to the engine."""

SIDEWAYS = {
    ("engine", "diagnosis"): "prepare(on_skip=...) watches an engine's steps",
    ("diagnosis", "engine"): "a diagnosis replays forward passes of prepared models",
    ("optim", "amp"): "an ApexOptimWrapper calls amp",
    ("runner", "optim"): "a Runner drives an OptimWrapper",
    ("recipes", "insight"): "a ready job shows its own history",
    ("cli", "shim"): "halfpeak run installs a shim around a script",
}
"""Pairs of packages of one layer in which the first may import the second."""


def package_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYER else ""


def test_every_package_has_a_layer() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    require_none(packages - LAYER.keys(), "give it a layer in LAYER, and a row in docs/ARCHITECTURE.md")
    bare = [package for package in packages if not (PACKAGE / package / "__init__.py").exists()]
    require_none(bare, "write its __init__.py")


def test_imports_go_down() -> None:
    wrong: list[str] = []
    for module in modules():
        if not module.package:
            continue
        for node, name in imports(module):
            if name.split(".")[0] != "halfpeak":
                continue
            package = package_of(name)
            below = (LAYER[package] if package else TOP) < LAYER[module.package]
            if not (below or package == module.package or (module.package, package) in SIDEWAYS):
                wrong.append(
                    f"{module.at(node)}: {module.package} (layer {LAYER[module.package]}) imports {name}"
                )
    require_none(
        wrong,
        "move what both need to a lower layer, or pass it in as an argument; docs/ARCHITECTURE.md has the layers",
    )


def test_no_cycles() -> None:
    names = {module.name for module in modules()}
    graph = {module.name: targets(module) & names for module in modules()}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        cycle = " -> ".join(error.args[1])
        raise AssertionError(
            f"import cycle: {cycle}; put what both files need into a third, or make them one"
        ) from None
    assert len(order) == len(names)


def test_no_own_imports_inside_functions() -> None:
    hidden = [
        f"{module.at(node)}: {name}"
        for module in modules()
        for inside in [{node for function in functions(module.tree) for node in ast.walk(function)}]
        for node, name in imports(module)
        if node in inside and name.split(".")[0] == "halfpeak"
    ]
    require_none(
        hidden, "import it at the top; where that makes a cycle, put what both files need into a third"
    )


def targets(module: Module) -> set[str]:
    """What a module imports, also for types only: two files that must be read together should be one."""
    return {name for _, name in imports(module)}
