"""The curves that learning rates and momenta follow: numbers in, a number out."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from halfpeak.core.errors import ConfigError, ConfigTypeError


def cosine(start: float, end: float, place: float) -> float:
    """From ``start`` (place 0) to ``end`` (place 1) along half a cosine.

    >>> round(cosine(1.0, 0.0, 0.5), 6)
    0.5
    """
    return end + 0.5 * (start - end) * (math.cos(math.pi * place) + 1)


def linear(start: float, end: float, place: float) -> float:
    """From ``start`` (place 0) to ``end`` (place 1) along a line."""
    return start + (end - start) * place


ANNEALS: Final[Mapping[str, Callable[[float, float, float], float]]] = {"cos": cosine, "linear": linear}


def anneal(strategy: str) -> Callable[[float, float, float], float]:
    """The curve with that name.

    Raises:
        ConfigError: there is none.
    """
    if strategy not in ANNEALS:
        raise ConfigError(f"anneal_strategy={strategy!r} must be one of {', '.join(map(repr, ANNEALS))}")
    return ANNEALS[strategy]


class Steps:
    """``base * gamma ** n``, where n counts the steps until now, and never below ``floor``.

    Args:
        step: one every so many, or a list of the places where they are.

    >>> steps = Steps([2, 4], 0.5)
    >>> [steps(8.0, place) for place in range(5)]
    [8.0, 8.0, 4.0, 4.0, 2.0]
    """

    def __init__(self, step: int | Sequence[int], gamma: float, floor: float | None = None) -> None:
        several: Any = step if isinstance(step, (list, tuple)) else [step]
        if not several or not all(type(one) is int for one in several):
            raise ConfigTypeError(
                f"step={step!r} must be an integer or a list of integers; write step=[8, 11]"
            )
        if any(one < 1 for one in several):
            raise ConfigError(f"step={step!r} must be above 0; write step=[8, 11]")
        self.step, self.gamma, self.floor = step, require_number("gamma", gamma), floor

    def __call__(self, base: float, place: int) -> float:
        """The value at ``place``."""
        count = place // self.step if isinstance(self.step, int) else sum(place >= one for one in self.step)
        value = base * self.gamma**count
        return value if self.floor is None else max(value, self.floor)


class Target:
    """Where a curve ends: at a number, or at a fraction of where it begins. Exactly one of them is given."""

    def __init__(self, name: str, value: float | None, ratio: float | None) -> None:
        if (value is None) == (ratio is None):
            raise ConfigError(
                f"exactly one of {name}={value!r} and {name}_ratio={ratio!r} must be given; write {name}=0"
            )
        self._value = None if value is None else require_number(name, value)
        self._ratio = None if ratio is None else require_number(f"{name}_ratio", ratio)

    def __call__(self, base: float) -> float:
        """The end of a curve that begins at ``base``."""
        return base * self._ratio if self._value is None else self._value  # type: ignore[operator]


class Cycles:
    """Cycles up to ``base * up`` and down to ``base * down``; each one's excursion is ``gamma`` times the last one's.

    Args:
        target_ratio: ``(up, down)``; a single number means that and 1e-5 of it.
        cyclic_times: cycles in the run.
        step_ratio_up: the part of a cycle until its peak.
    """

    def __init__(
        self,
        target_ratio: float | Sequence[float],
        cyclic_times: int,
        step_ratio_up: float,
        anneal_strategy: str,
        gamma: float,
    ) -> None:
        given: Any = target_ratio if isinstance(target_ratio, (list, tuple)) else (target_ratio,)
        if len(given) not in (1, 2):
            raise ConfigError(f"target_ratio={target_ratio!r} must be one number or a pair; write (10, 1e-4)")
        self._up = require_number("target_ratio", given[0])
        self._down = require_number("target_ratio", given[1]) if len(given) == 2 else self._up / 1e5
        if isinstance(cyclic_times, bool) or not isinstance(cyclic_times, int) or cyclic_times < 1:
            raise ConfigError(f"cyclic_times={cyclic_times!r} must be an integer of 1 or more")
        if not 0 <= require_number("step_ratio_up", step_ratio_up) < 1:
            raise ConfigError(f"step_ratio_up={step_ratio_up!r} must be at least 0 and below 1")
        if not 0 < require_number("gamma", gamma) <= 1:
            raise ConfigError(f"gamma={gamma!r} must be above 0 and at most 1")
        self._times, self._ratio_up, self._gamma = cyclic_times, step_ratio_up, gamma
        self._anneal = anneal(anneal_strategy)

    def __call__(self, base: float, place: int, total: int) -> float:
        """The value at ``place`` of a run of ``total``."""
        length = max(total // self._times, 1)
        rise = int(self._ratio_up * length)
        cycle, inside = divmod(place, length)
        peak = base + base * (self._up - 1) * self._gamma**cycle
        if inside < rise:
            return self._anneal(base, peak, inside / rise)
        return self._anneal(peak, base * self._down, (inside - rise) / (length - rise))


class Phase(NamedTuple):
    """A stretch of a :class:`OneCycle`: its last place, and the two ends by name."""

    last: float
    start: str
    end: str


class OneCycle:
    """Up in the first ``pct_start`` of the run, down in the rest; or up, back, and down to the very end.

    Super-Convergence, Smith and Topin 2018 (arXiv:1708.07120); the places are those of ``torch``'s ``OneCycleLR``.
    """

    def __init__(self, pct_start: float, anneal_strategy: str, three_phase: bool) -> None:
        if isinstance(pct_start, bool) or not isinstance(pct_start, float) or not 0 <= pct_start <= 1:
            raise ConfigError(f"pct_start={pct_start!r} must be a float from 0 to 1; write pct_start=0.3")
        if not isinstance(three_phase, bool):
            raise ConfigTypeError(f"three_phase={three_phase!r} must be True or False")
        self._pct, self._anneal, self._three = pct_start, anneal(anneal_strategy), three_phase

    def __call__(self, ends: Mapping[str, float], place: int, total: int) -> float:
        """The value at ``place``.

        Args:
            ends: the values called ``start``, ``peak`` and ``end``.
        """
        first = 0.0
        phases = self._phases(total)
        for phase in phases:
            if place <= phase.last or phase is phases[-1]:
                part = (place - first) / (phase.last - first) if phase.last > first else 1.0
                return self._anneal(ends[phase.start], ends[phase.end], part)
            first = phase.last
        raise AssertionError("the last phase takes every place")

    def _phases(self, total: int) -> list[Phase]:
        rise = float(self._pct * total) - 1
        if self._three:
            back = float(2 * self._pct * total) - 2
            return [
                Phase(rise, "start", "peak"),
                Phase(back, "peak", "start"),
                Phase(total - 1, "start", "end"),
            ]
        return [Phase(rise, "start", "peak"), Phase(total - 1, "peak", "end")]


class Restarts:
    """Half a cosine per period, each from its weight times the distance to the end.

    SGDR, Loshchilov and Hutter 2017 (arXiv:1608.03983).
    """

    def __init__(self, periods: Sequence[int], restart_weights: Sequence[float]) -> None:
        if not isinstance(periods, (list, tuple)) or not all(type(one) is int and one > 0 for one in periods):
            raise ConfigError(f"periods={periods!r} must be a list of lengths; write periods=[100, 200]")
        if len(periods) != len(restart_weights) or not periods:
            raise ConfigError(
                f"{len(periods)} periods and {len(restart_weights)} restart_weights; give one weight per period"
            )
        self._ends = list(accumulate(periods))
        self._periods, self._weights = list(periods), list(restart_weights)

    def __call__(self, base: float, end: float, place: int) -> float:
        """The value at ``place``.

        Raises:
            ConfigError: it comes after the last period.
        """
        number = bisect_right(self._ends, place)
        if number == len(self._ends):
            raise ConfigError(
                f"iteration {place} comes after the last of periods={self._periods}; let them add up to the whole run"
            )
        inside = place - (self._ends[number] - self._periods[number])
        start = end + self._weights[number] * (base - end)
        return cosine(start, end, inside / self._periods[number])


def require_number(name: str, value: Any) -> float:
    """A finite number.

    Raises:
        ConfigTypeError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigTypeError(f"{name}={value!r} must be a finite number; write {name}=0.1")
    return value
