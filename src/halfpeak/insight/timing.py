"""Compares the times of two training steps that are taken in turns, until the spread allows a verdict."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

Timer = Callable[[], float | None]
"""Takes some steps and returns the seconds of one; None if they cannot be compared, such as skipped steps."""

LEAST_PAIRS: Final = 11
"""After fewer pairs there is no verdict."""

MOST_PAIRS: Final = 45
"""After so many pairs there is a verdict or none."""

MOST_SECONDS: Final = 5.0
"""No pair begins after so many seconds, once there are :data:`LEAST_PAIRS`."""

WIDEST: Final = 1.25
"""If the upper end of an interval is more than so many times the lower, the machine was too busy for a verdict.

What disturbs a busy machine lasts for many pairs, so the interval is then narrower than what another run would say.
"""

DOUBT: Final = 0.002
"""The chance that the true median is outside of :attr:`Ratio.interval`, for independent pairs."""


@dataclass(frozen=True)
class Ratio:
    """The time of a step as a share of the time of another step, from pairs of times.

    Attributes:
        shares: one per pair.
        times: the median seconds of the two steps, the other step first.

    >>> Ratio((0.5,) * 9 + (0.6, 76.0), (2.0, 1.0)).interval
    (0.5, 76.0)
    >>> Ratio((0.5,) * 20 + (76.0,), (2.0, 1.0)).interval
    (0.5, 0.5)
    """

    shares: tuple[float, ...]
    times: tuple[float, float]

    @property
    def median(self) -> float:
        """The median share; nan without any."""
        return statistics.median(self.shares) if self.shares else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The shares between which the true median lies, whatever their distribution.

        As many shares are cut off at each end as fair coins would fall on the same side with a chance of
        :data:`DOUBT` / 2.
        """
        ordered, count = sorted(self.shares), len(self.shares)
        cut, chance = 0, 2.0 ** (1 - count)
        while cut < count // 2 and chance <= DOUBT:
            cut += 1
            chance += math.comb(count, cut) * 2.0 ** (1 - count)
        return (ordered[cut - 1], ordered[-cut]) if cut else (-math.inf, math.inf)

    @property
    def is_wide(self) -> bool:
        """Whether the interval is too wide for a verdict.

        >>> Ratio((0.43,) * 10 + (0.89,) * 10, (1.0, 0.69)).is_wide, Ratio((0.7, 0.8) * 10, (1.0, 0.75)).is_wide
        (True, False)
        """
        low, high = self.interval
        return math.isfinite(low) and high > WIDEST * low

    def is_below(self, limit: float, *, least: float = 0.0) -> bool | None:
        """Whether the share is below a limit; None if that cannot be told, or if the median is below ``least``."""
        low, high = self.interval
        if self.is_wide:
            return None
        if low >= limit:
            return False
        return True if high < limit and self.median >= least else None


def compare(
    one: Timer,
    other: Timer,
    limit: float,
    *,
    tell: Callable[[int, int], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Ratio:
    """The time of ``other`` as a share of that of ``one``, from pairs taken in turns.

    Ends as soon as the share is surely below the limit, or surely not, and after :data:`MOST_PAIRS` or :data:`MOST_SECONDS`.

    Args:
        limit: the share of which it matters on which side the true share is.
        tell: called after each pair with the number of pairs and their largest number.
        clock: returns the seconds that count towards :data:`MOST_SECONDS`.
    """
    began = clock()
    shares: list[float] = []
    times: list[tuple[float, float]] = []
    for number in range(MOST_PAIRS):
        # The order changes, so that a machine that gets slower and slower favours neither.
        if number % 2:
            second, first = other(), one()
        else:
            first, second = one(), other()
        if tell is not None:
            tell(number + 1, MOST_PAIRS)
        if first and second:
            times.append((first, second))
            shares.append(second / first)
            found = Ratio(tuple(shares), (0.0, 0.0))
            if len(shares) >= LEAST_PAIRS and found.is_below(limit) is not None:
                break
        if number + 1 >= LEAST_PAIRS and clock() - began >= MOST_SECONDS:
            break
    first, second = zip(*times, strict=True) if times else ((math.nan,), (math.nan,))
    return Ratio(tuple(shares), (statistics.median(first), statistics.median(second)))
