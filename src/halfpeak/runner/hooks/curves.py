"""Curves of learning rates and momenta: functions from a position in the run to a value, independent of hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_choice, require_count, require_flag, require_number

Total: TypeAlias = Callable[[], int]
"""Returns the length of a schedule. Only curves that need it call it, because a run may have no length in that unit."""

Shape: TypeAlias = Callable[[float, float, float], float]
"""``(start, end, place) -> value``, for a place between 0 and 1."""


def cosine(start: float, end: float, place: float, weight: float = 1.0) -> float:
    """From ``start`` (place 0) to ``end`` (place 1) along half a cosine; ``weight`` multiplies its height.

    >>> round(cosine(1.0, 0.0, 0.5), 6)
    0.5
    """
    return end + 0.5 * weight * (start - end) * (math.cos(math.pi * place) + 1)


def linear(start: float, end: float, place: float) -> float:
    """From ``start`` (place 0) to ``end`` (place 1) along a line."""
    return start + (end - start) * place


SHAPES: Final[Mapping[str, Shape]] = {"cos": cosine, "linear": linear}


class Curve(Protocol):
    """A value for each position, which is the number of finished epochs or iterations."""

    def __call__(self, base: float, place: int, total: Total) -> float:
        """The value at position ``place``, for the initial value ``base``."""
        ...


class Steps:
    """``base * gamma ** n`` after n steps, and never below ``minimum``.

    Args:
        step: the distance between two steps, or a list of the positions of all steps.

    >>> steps = Steps([2, 4], 0.5, None)
    >>> [steps(8.0, place, int) for place in range(5)]
    [8.0, 8.0, 4.0, 4.0, 2.0]
    """

    def __init__(self, step: int | Sequence[int], gamma: float, minimum: float | None) -> None:
        several: Any = step if isinstance(step, (list, tuple)) else [step]
        if not several or not all(type(one) is int for one in several):
            raise ConfigTypeError(
                f"step={short_repr(step)} must be an integer or a list of integers; write step=[8, 11]"
            )
        if any(one < 1 for one in several):
            raise ConfigError(f"step={short_repr(step)} must be above 0; write step=[8, 11]")
        self.step, self.gamma, self.minimum = step, require_number("gamma", gamma), minimum

    def __call__(self, base: float, place: int, total: Total) -> float:
        """The value after all steps up to ``place``."""
        count = place // self.step if isinstance(self.step, int) else sum(place >= one for one in self.step)
        value = base * self.gamma**count
        return value if self.minimum is None else max(value, self.minimum)


class Target:
    """The final value of a curve: a number, or a ratio of the initial value. The caller must give exactly one.

    Args:
        name: name of the number in messages, such as ``"min_lr"``.
    """

    def __init__(self, name: str, value: float | None, ratio: float | None) -> None:
        if (value is None) == (ratio is None):
            raise ConfigError(
                f"exactly one of {name}={short_repr(value)} and {name}_ratio={short_repr(ratio)} must be given; write {name}=0"
            )
        self._value = None if value is None else require_number(name, value)
        self._ratio = None if ratio is None else require_number(f"{name}_ratio", ratio)

    def __call__(self, base: float) -> float:
        """The final value of a curve with the initial value ``base``."""
        return base * self._ratio if self._value is None else self._value  # type: ignore[operator]


class Annealing:
    """A curve from ``base`` to ``target`` over the whole run, along :func:`cosine` or :func:`linear`."""

    def __init__(self, shape: Shape, target: Target) -> None:
        self._shape, self._target = shape, target

    def __call__(self, base: float, place: int, total: Total) -> float:
        """The value at position ``place``."""
        return self._shape(base, self._target(base), place / total())


class Cycles:
    """Cycles up to ``base * up`` and down to ``base * down``; each rise is ``gamma`` times the previous rise.

    Args:
        target_ratio: ``(up, down)``; a single number means ``(up, up / 1e5)``.
        cyclic_times: the number of cycles in the run.
        step_ratio_up: the fraction of a cycle before its peak.
        anneal_strategy: ``"cos"`` or ``"linear"``.
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
            raise ConfigError(
                f"target_ratio={short_repr(target_ratio)} must be one number or a pair; write (10, 1e-4)"
            )
        self._up = require_number("target_ratio", given[0])
        self._down = require_number("target_ratio", given[1]) if len(given) == 2 else self._up / 1e5
        self._times = require_count("cyclic_times", cyclic_times)
        if not 0 <= require_number("step_ratio_up", step_ratio_up) < 1:
            raise ConfigError(f"step_ratio_up={short_repr(step_ratio_up)} must be at least 0 and below 1")
        if not 0 < require_number("gamma", gamma) <= 1:
            raise ConfigError(f"gamma={short_repr(gamma)} must be above 0 and at most 1")
        self._ratio_up, self._gamma, self._shape = step_ratio_up, gamma, _shape_of(anneal_strategy)

    def __call__(self, base: float, place: int, total: Total) -> float:
        """The value at position ``place``, on the rise or the fall of its cycle."""
        length = max(total() // self._times, 1)
        rise = int(self._ratio_up * length)
        cycle, inside = divmod(place, length)
        peak = base + base * (self._up - 1) * self._gamma**cycle
        if inside < rise:
            return self._shape(base, peak, inside / rise)
        return self._shape(peak, base * self._down, (inside - rise) / (length - rise))


class Ends(NamedTuple):
    """The initial, peak and final value of a :class:`OneCycle`."""

    start: float
    peak: float
    end: float


class OneCycle:
    """Up in the first ``pct_start`` of the run, then down to the end; with ``three_phase``, first back to the start.

    Super-Convergence, Smith and Topin 2018 (arXiv:1708.07120); positions are the same as in torch's ``OneCycleLR``.
    """

    def __init__(self, pct_start: float, anneal_strategy: str, three_phase: bool) -> None:
        if not isinstance(pct_start, float) or not 0 <= pct_start <= 1:
            raise ConfigError(
                f"pct_start={short_repr(pct_start)} must be a float from 0 to 1; write pct_start=0.3"
            )
        self._three = require_flag("three_phase", three_phase)
        self._pct, self._shape = pct_start, _shape_of(anneal_strategy)

    def __call__(self, ends: Ends, place: int, total: int) -> float:
        """The value at position ``place``."""
        rise = float(self._pct * total) - 1
        phases = [(rise, ends.start, ends.peak), (float(total - 1), ends.peak, ends.end)]
        if self._three:
            back = float(2 * self._pct * total) - 2
            phases[1:] = [(back, ends.peak, ends.start), (float(total - 1), ends.start, ends.end)]
        first, (last, begin, end) = 0.0, phases[0]
        for phase in phases[1:]:
            if place <= last:
                break
            first, (last, begin, end) = last, phase
        return self._shape(begin, end, (place - first) / (last - first) if last > first else 1.0)


def _shape_of(strategy: str) -> Shape:
    return SHAPES[require_choice("anneal_strategy", strategy, SHAPES)]
