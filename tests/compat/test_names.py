"""Every name of mmengine.optim and mmcv.runner is the same in halfpeak, or the page gives the reason."""

from __future__ import annotations

from typing import Any

import pytest

from compat.facts import facts
from compat.names import PAGE, REASONS, compared, originals, page, verdicts


def test_what_differs_has_a_reason_and_nothing_else() -> None:
    differs = {
        name: verdict
        for library, table in originals().items()
        for name, _, verdict in verdicts(library, table)
        if not verdict.startswith("same")
    }
    assert differs.keys() == REASONS.keys(), differs
    for name, verdict in differs.items():
        assert REASONS[name].startswith("absent") == (verdict == "absent"), name


def test_the_page_is_what_the_generator_writes() -> None:
    assert PAGE.read_text() == page(), "write it again: PYTHONPATH=src:tests python -m compat.names"


def test_facts_are_read_from_any_source() -> None:
    source = """
if True:
    class A:
        def __init__(self, a, *, b=1): self.c = a
        def _hidden(self): self._inner_count = 2
        @property
        def d(self): ...
else:
    class A: ...
def f(x: int = 2, **kwargs): ...
LIST = []
"""
    expected = {
        "A": "(a, *, b=1)",
        "A.d": "",
        "A.c": "",
        "A._inner_count": "",
        "f": "(x=2, **kwargs)",
        "LIST": "",
    }
    assert facts(source) == expected


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (lambda a, b=1: None, "same"),
        (lambda a, b=1, *, c=2: None, "same, and `c`"),
        (lambda a, **kwargs: None, "same"),
        (lambda a: None, "no `b`"),
        (lambda a, b=2: None, "`b=2`"),
        (lambda b=1, a=None: None, "`a=None`"),
        (lambda a, b=1, *, c: None, "needs `c`"),
    ],
)
def test_signatures_are_compared_by_place_name_and_default(ours: Any, verdict: str) -> None:
    assert compared("(a, b=1)", ours, is_method=False) == verdict
