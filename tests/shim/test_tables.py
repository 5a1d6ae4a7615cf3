"""Every row of the shims' tables: its module can be imported, found and reloaded, and its names are the sources'."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from halfpeak import shim
from halfpeak.shim import spec
from halfpeak.shim.installing import SHIMS

ROWS = [(name, module) for name, row in SHIMS.items() for module in row.modules]
ABSENT = [(name, absent) for name, row in SHIMS.items() for absent in row.absent]
ELSEWHERE = [(name, full) for name, row in SHIMS.items() for full in row.elsewhere]


@pytest.fixture
def module(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module of a row, imported before any other module of its shim."""
    name, fullname = request.param
    shim.install(name)
    assert fullname not in sys.modules
    spec = importlib.util.find_spec(fullname)
    assert spec is not None
    yield importlib.import_module(fullname)
    shim.uninstall(name)
    assert not {one.partition(".")[0] for one in sys.modules} & {*SHIMS[name].packages}


@pytest.mark.parametrize("module", ROWS, ids=[module for _, module in ROWS], indirect=True)
def test_a_row_is_a_module(module: Any) -> None:
    fullname = module.__name__
    parent, _, leaf = fullname.rpartition(".")
    table = SHIMS["mmcv" if fullname.startswith("mmcv") else "apex"]
    is_package = hasattr(module, "__path__")
    assert is_package == table.is_package(fullname)
    assert module.__package__ == module.__spec__.parent == (fullname if is_package else parent)
    assert module.__file__ == module.__spec__.origin == table.table
    assert module.__loader__ is module.__spec__.loader
    assert fullname in module.__doc__

    names: dict[str, Any] = {}
    exec(f"from {fullname} import *", names)
    del names["__builtins__"]
    assert sorted(names) == module.__all__
    for name, value in names.items():
        assert value is getattr(module, name)
        assert pickle.loads(f"c{fullname}\n{name}\n.".encode()) is value
        defined_in = getattr(value, "__module__", "")
        assert defined_in.partition(".")[0] not in table.packages, f"{name} would go with the shim"

    if is_package:
        rows = {name.rpartition(".")[2] for name in table.modules if name.rpartition(".")[0] == fullname}
        for name in rows - {*module.__all__}:
            assert getattr(module, name) is sys.modules[f"{fullname}.{name}"]
    if parent and leaf not in sys.modules[parent].__all__:
        assert getattr(sys.modules[parent], leaf) is module
    assert importlib.reload(module) is module
    assert module.__all__ == sorted(names)


@pytest.mark.parametrize("module", ROWS, ids=[module for _, module in ROWS], indirect=True)
def test_a_name_that_a_module_has_not(module: Any) -> None:
    fullname = module.__name__
    refused = f"halfpeak does not provide {fullname}.nothere; "
    with pytest.raises(AttributeError, match=refused):
        module.nothere  # noqa: B018
    with pytest.raises(ImportError, match=refused if hasattr(module, "__path__") else "cannot import name"):
        exec(f"from {fullname} import nothere", {})
    if hasattr(module, "__path__"):
        with pytest.raises(ImportError, match=refused):
            importlib.import_module(f"{fullname}.nothere")
        assert importlib.util.find_spec(f"{fullname}.nothere") is None


def test_an_attribute_may_have_the_name_of_a_submodule(apex_installed: None) -> None:
    """Importing the submodule, before or after, does not put it in the place of the attribute."""
    for fullname in ("apex.amp._amp_state", "apex.parallel.LARC"):
        submodule = importlib.import_module(fullname)
        parent, _, leaf = fullname.rpartition(".")
        assert getattr(sys.modules[parent], leaf) is getattr(submodule, leaf)
        assert not isinstance(getattr(submodule, leaf), ModuleType)


@pytest.mark.parametrize(("name", "absent"), ABSENT, ids=[absent for _, absent in ABSENT])
def test_what_is_absent_is_refused_with_advice(
    name: str, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = SHIMS[name]
    monkeypatch.setattr(spec, "find_spec", lambda name: None)  # no other library answers
    shim.install(name)
    try:
        # A row of advice may have the name of an existing module; it then covers what is missing below it.
        asked = f"{absent}.missing" if absent in row.modules else absent
        parent, _, leaf = asked.rpartition(".")
        message = f"halfpeak does not provide {asked}; {row.absent[absent]}"
        for statement in (f"import {asked}", f"from {parent} import {leaf}", f"import {asked}.x.y"):
            with pytest.raises(ImportError) as caught:
                exec(statement, {})
            assert str(caught.value) == message
            assert caught.value.name == asked
        with pytest.raises(AttributeError) as missing:
            getattr(importlib.import_module(parent), leaf)
        assert str(missing.value) == message
        assert importlib.util.find_spec(asked) is None
    finally:
        shim.uninstall(name)


@pytest.mark.parametrize(("name", "fullname"), ELSEWHERE, ids=[fullname for _, fullname in ELSEWHERE])
def test_what_another_library_has_is_its_own(name: str, fullname: str) -> None:
    source, _, original = SHIMS[name].elsewhere[fullname].partition(":")
    parent, _, leaf = fullname.rpartition(".")
    shim.install(name)
    try:
        found: dict[str, Any] = {}
        exec(f"from {parent} import {leaf} as found", found)
        assert found["found"] is getattr(importlib.import_module(source), original)
    finally:
        shim.uninstall(name)
