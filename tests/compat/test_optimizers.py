"""Optimizers of torch and of other packages train, skip and resume at every level as the page says."""

from __future__ import annotations

import pytest

from compat.optimizers import PAGE, ROWS, row, table_of


@pytest.mark.filterwarnings("ignore")  # warnings of other packages
@pytest.mark.parametrize("name", ROWS)
def test_the_page_says_what_an_optimizer_does(name: str) -> None:
    assert row(name) in table_of(PAGE.read_text()), "write: PYTHONPATH=src:tests python -m compat.optimizers"


def test_the_page_has_no_other_rows() -> None:
    assert len(table_of(PAGE.read_text())) == 2 + len(ROWS)
