"""What a user may import, and what importing it costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest

import halfpeak
from laws.source import ROOT, for_types_only, modules

DECLARED = [
    module.name
    for module in modules()
    if any(line.startswith("__all__") for line in module.text.splitlines()) and "triton" not in module.name
]
"""Modules that state their public names."""


def test_a_type_checker_sees_the_names_that_are_imported_on_demand() -> None:
    (package,) = (module for module in modules() if module.name == "halfpeak")
    seen = {
        alias.name: alias.name if node.module == "halfpeak" else str(node.module).removeprefix("halfpeak.")
        for node in for_types_only(package)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == halfpeak._MODULE_OF, (
        "in halfpeak/__init__.py: imports under TYPE_CHECKING, _NAMES_IN and __all__"
    )
    assert set(halfpeak.__all__) == {name for name, home in seen.items() if home != name} | {"amp"}
    assert {name for name in dir(halfpeak) if not name.startswith("__")} == seen.keys()
    assert all(
        isinstance(getattr(halfpeak, name), ModuleType) == (home == name) for name, home in seen.items()
    )
    with pytest.raises(AttributeError, match="no attribute 'prepair'"):
        _ = halfpeak.prepair


@pytest.mark.parametrize("name", DECLARED)
def test_declared_names_are_sorted_and_exist(name: str) -> None:
    module = importlib.import_module(name)
    declared = list(module.__all__)
    assert declared == sorted(set(declared), key=by_kind), "write: ruff check --fix"
    assert not [one for one in declared if not hasattr(module, one)]


@pytest.mark.parametrize("name", DECLARED)
def test_every_public_function_and_class_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    things = {one: getattr(module, one) for one in module.__all__}
    silent = [
        one
        for one, thing in things.items()
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and not inspect.getdoc(thing)
    ]
    assert not silent


def by_kind(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each by name: the order in which ruff keeps ``__all__``."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


PROBE = """
import json, sys, threading, warnings
warnings.simplefilter("error", category=Warning)
import torch
before = set(sys.modules)
dtype, threads = torch.get_default_dtype(), threading.active_count()
from halfpeak import *
import halfpeak.amp
new = {module.split(".")[0] for module in set(sys.modules) - before}
print(json.dumps({
    "third party": sorted(new - set(sys.stdlib_module_names) - {"halfpeak", "torch"}),
    "slow": sorted({"torch._dynamo", "torch._inductor"} & (set(sys.modules) - before)),
    "cuda context": torch.cuda.is_initialized(),
    "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    "autocast": torch.is_autocast_enabled("cpu"),
    "function modes": torch._C._len_torch_function_stack(),
    "default dtype": torch.get_default_dtype() is not dtype,
    "threads": threading.active_count() - threads,
}))
"""


def test_a_lean_import() -> None:
    """Importing brings no third-party package beyond torch's own, starts nothing and changes nothing."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert not {what: found for what, found in json.loads(done.stdout).items() if found}
