"""``when_imported`` runs an action as soon as a module is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from halfpeak.shim.import_hooks import when_imported
from halfpeak.shim.spec import Undo

NAME = "halfpeak_later_probe"


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = list(sys.meta_path)
    yield []
    sys.modules.pop(NAME, None)
    assert sys.meta_path == path


def test_it_waits_for_the_import(seen: list[str]) -> None:
    def action(module: ModuleType) -> Undo:
        seen.append(f"did {module.value}")  # set by the module's code
        return lambda: seen.append("undid")

    undo = when_imported(NAME, action)
    assert seen == []
    module = importlib.import_module(NAME)
    assert seen == ["did 1"]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    undo()
    assert seen == ["did 1", "undid"]


def test_it_acts_at_once_where_the_module_is_there(seen: list[str]) -> None:
    importlib.import_module(NAME)
    undo = when_imported(NAME, lambda module: seen.append("did") or (lambda: seen.append("undid")))
    assert seen == ["did"]
    undo()
    undo()
    assert seen == ["did", "undid"]


def test_what_was_not_imported_was_not_done(seen: list[str]) -> None:
    when_imported(NAME, lambda module: seen.append("did") or (lambda: None))()
    importlib.import_module(NAME)
    assert seen == []


def test_two_may_wait_for_one_module(seen: list[str]) -> None:
    undos = [
        when_imported(
            NAME, lambda module, name=name: seen.append(name) or (lambda: seen.append(f"undid {name}"))
        )
        for name in ("one", "two")
    ]
    importlib.import_module(NAME)
    assert sorted(seen) == ["one", "two"]
    for undo in undos:
        undo()
    assert sorted(seen) == ["one", "two", "undid one", "undid two"]


def test_a_module_that_is_not_there_is_not_made(seen: list[str]) -> None:
    undo = when_imported(f"{NAME}_missing", lambda module: seen.append("did") or (lambda: None))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{NAME}_missing")
    undo()
    assert seen == []
