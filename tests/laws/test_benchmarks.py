"""``docs/benchmarks.md`` shows the results that the benchmarks' files hold."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from laws.source import ROOT

FOLDER = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that makes the tables."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("_page")


def test_the_tables_are_those_of_the_results(page: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page.fill(text, page.load()) == text, "write: python benchmarks/plot.py"


def test_every_goal_is_measured(page: ModuleType) -> None:
    results = page.load()
    assert [goal.text for goal in page.GOALS if page._goal_line(goal, results) is None] == []


def test_every_question_has_its_script_and_its_picture(page: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for question in page.QUESTIONS:
        assert f"`benchmarks/{question}.py`" in text
        assert f"](_static/benchmarks/{question}.svg)" in text
        assert (FOLDER / f"{question}.py").exists()
        assert (ROOT / "docs" / "_static" / "benchmarks" / f"{question}.svg").exists()


def test_a_table_is_put_in_place_of_the_one_before(page: ModuleType) -> None:
    text = "a\n<!-- begin compile -->\nold\n<!-- end -->\nb\n"
    row = {"case": "10 tensors", "variant": "X", "s": "1.5", "min_s": "1.0", "max_s": "2.0", "cpu_s": "1.25"}
    row |= {"start_s": "3.0", "kernels": "2", "later": "0", "device": "P, 1 thread", "date": "2020-01-01"}
    row |= {"torch": "2", "halfpeak": "0", "python": "3", "rounds": "3"}
    filled = page.fill(text, {"compile": [row]})
    assert "old" not in filled
    assert "| 10 tensors: X | **1.5 s** (1.0 to 2.0) | 1.25 s | 3.0 s | 2 | 0 |" in filled
    assert page.fill(filled, {"compile": [row]}) == filled
