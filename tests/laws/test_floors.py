"""Imports go down the house, never up, sideways between doors, or in circles."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

from laws.source import PACKAGE, Module, for_types_only, functions, imports, modules

FLOOR = {
    "core": 0,
    "ops": 1,
    "parts": 2,
    "casting": 2,
    "checkpoint": 2,
    "fused": 2,
    "engine": 3,
    "amp": 4,
    "optim": 4,
    "runner": 4,
    "insight": 5,
    "integrations": 5,
    "migrate": 5,
    "recipes": 5,
    "cli": 6,
    "shim": 6,
}

TOP = FLOOR["engine"]
"""``import halfpeak`` itself reaches up to the engine."""

SIDEWAYS = {
    ("runner", "optim"): "a Runner drives an OptimWrapper",
    ("recipes", "insight"): "a ready job shows its own history",
    ("cli", "shim"): "halfpeak run installs a shim around a script",
}
"""Rooms of one floor that may see each other."""


def room_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR else ""


def test_every_room_has_a_floor() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms <= FLOOR.keys()
    assert not [room for room in rooms if not (PACKAGE / room / "__init__.py").exists()]


def test_imports_go_down() -> None:
    wrong: list[str] = []
    for module in modules():
        if not module.room:
            continue
        for node, name in imports(module):
            if name.split(".")[0] != "halfpeak":
                continue
            room = room_of(name)
            below = (FLOOR[room] if room else TOP) < FLOOR[module.room]
            if not (below or room == module.room or (module.room, room) in SIDEWAYS):
                wrong.append(f"{module.at(node)}: {module.room} (floor {FLOOR[module.room]}) imports {name}")
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_the_command_line_or_the_shim() -> None:
    outsiders = [
        f"{module.at(node)}: {name}"
        for module in modules()
        for node, name in imports(module)
        if room_of(name) in ("cli", "shim")
        and module.room != room_of(name)
        and (module.room, room_of(name)) not in SIDEWAYS
        and module.where != "__main__.py"
    ]
    assert not outsiders, "\n".join(outsiders)


def test_no_cycles() -> None:
    names = {module.name for module in modules()}
    graph = {module.name: targets(module) & names for module in modules()}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"import cycle: {' -> '.join(error.args[1])}") from None
    assert len(order) == len(names)


def test_no_own_imports_inside_functions() -> None:
    hidden = [
        f"{module.at(node)}: {name}"
        for module in modules()
        for function in functions(module.tree)
        for node, name in imports_of(module, function)
        if name.split(".")[0] == "halfpeak"
    ]
    assert not hidden, "\n".join(hidden)


def targets(module: Module) -> set[str]:
    """What a module imports when it is run."""
    idle = for_types_only(module)
    return {name for node, name in imports(module) if node not in idle}


def imports_of(module: Module, function: ast.AST) -> list[tuple[ast.stmt, str]]:
    inside = set(ast.walk(function))
    return [(node, name) for node, name in imports(module) if node in inside]
