"""Accumulation windows and loss divisors, compared with a table measured on mmengine and mmcv."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from halfpeak.core.accumulation import Accumulation
from halfpeak.core.errors import ConfigError

TABLE = [
    # every, total, first index, then per backward pass (index, divisor, whether a step follows)
    (3, None, 0, [(0, 3, False), (1, 3, False), (2, 3, True), (3, 3, False), (4, 3, False), (5, 3, True)]),
    (3, 7, 3, [(3, 3, False), (4, 3, False), (5, 3, True), (6, 1, True)]),
    (3, 2, 0, [(0, 2, False), (1, 2, True)]),
    (3, 7, 2, [(2, 3, True), (3, 3, False), (4, 3, False), (5, 3, True), (6, 1, True)]),
    (3, 8, 4, [(4, 3, False), (5, 3, True), (6, 2, False), (7, 2, True)]),
    (4, 1, 0, [(0, 1, True)]),
    (1, 3, 0, [(0, 1, True), (1, 1, True), (2, 1, True), (3, 1, True)]),
    # Past the end, mmengine and mmcv fail or divide by the remainder; halfpeak begins a new window there.
    (3, 6, 5, [(5, 3, True), (6, 3, False), (7, 3, False), (8, 3, True)]),
    (3, 7, 6, [(6, 1, True), (7, 2, False), (8, 2, True)]),
]


@pytest.mark.parametrize(("every", "total", "first", "rows"), TABLE)
def test_table(every: int, total: int | None, first: int, rows: list[tuple[int, int, bool]]) -> None:
    plan = Accumulation(every=every, total=total)
    assert [(i, plan.divisor(i), plan.is_boundary(i)) for i in range(first, first + len(rows))] == rows


@pytest.mark.parametrize("every", range(1, 8))
def test_each_window_of_a_run_steps_the_mean_of_its_gradients(every: int) -> None:
    for total in range(1, 25):
        plan = Accumulation(every=every, total=total)
        held, steps = Fraction(0), []
        for index in range(total + 2 * every - total % every):  # also past the end
            held += Fraction(1, plan.divisor(index))
            if plan.is_boundary(index):
                steps.append(held)
                held = Fraction(0)
            if index + 1 == total:
                assert (held, len(steps)) == (0, -(-total // every))
        assert held == 0
        assert set(steps) == {1}


@pytest.mark.parametrize("value", [0, -1, 1.0, "4", None, True, float("nan"), [4]], ids=repr)
def test_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="accumulate="):
        Accumulation(every=value)
    if value is not None:
        with pytest.raises(ConfigError, match="total="):
            Accumulation(total=value)
