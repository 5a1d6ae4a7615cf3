"""What a user may import, and what importing it costs."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest

import halfpeak
from laws.source import ROOT, modules

DECLARED = [
    module.name
    for module in modules()
    if any(line.startswith("__all__") for line in module.text.splitlines()) and "triton" not in module.name
]
"""Modules that state their public names."""


def public_names(module: ModuleType) -> set[str]:
    """What a module binds for its users: no underscore, no submodule that was merely imported."""
    listed = set(getattr(module, "__all__", ()))
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name != "annotations"
        and (name in listed or not isinstance(value, ModuleType))
    }


def test_the_package_publishes_exactly_what_it_binds() -> None:
    assert set(halfpeak.__all__) - {"__version__"} == public_names(halfpeak)


@pytest.mark.parametrize("name", DECLARED)
def test_declared_names_are_sorted_and_exist(name: str) -> None:
    module = importlib.import_module(name)
    declared = list(module.__all__)
    assert declared == sorted(set(declared), key=by_kind)
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
import {name}
new = {{module.split(".")[0] for module in set(sys.modules) - before}}
print(json.dumps({{
    "third party": sorted(new - set(sys.stdlib_module_names) - {{"halfpeak", "torch"}}),
    "slow": sorted({{"torch._dynamo", "torch._inductor"}} & (set(sys.modules) - before)),
    "cuda context": torch.cuda.is_initialized(),
    "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    "autocast": torch.is_autocast_enabled("cpu"),
    "function modes": torch._C._len_torch_function_stack(),
    "default dtype": torch.get_default_dtype() is not dtype,
    "threads": threading.active_count() - threads,
}}))
"""


@pytest.mark.parametrize("name", ["halfpeak", "halfpeak.amp"])
def test_a_lean_import(name: str) -> None:
    """Importing brings no third-party package beyond torch's own, starts nothing and changes nothing."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(name=name)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert not {what: found for what, found in json.loads(done.stdout).items() if found}
