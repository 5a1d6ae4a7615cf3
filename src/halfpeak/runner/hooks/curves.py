"""The curves that learning rates and momenta follow: a place in, a value out. No hook and no runner is known here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_choice, require_count, require_flag, require_number

Total: TypeAlias = Callable[[], int]
"""The length of a schedule, asked for only by curves that need one: a run may have none in that unit."""

Curve: TypeAlias = Callable[[float, int, Total], float]
"""The value of a schedule that begins with a number, at a place that is counted in finished epochs or iterations.

It is a ``partial`` of a function of this module, because hooks are pickled with their curves.
"""

Shape: TypeAlias = Callable[[float, float, float], float]
"""From one value to another, for a place between 0 and 1."""


def cosine(start: float, end: float, place: float) -> float:
    """From ``start`` (place 0) to ``end`` (place 1) along half a cosine.

    >>> round(cosine(1.0, 0.0, 0.5), 6)
    0.5
    """
    return end + 0.5 * (start - end) * (math.cos(math.pi * place) + 1)


def linear(start: float, end: float, place: float) -> float:
    """From ``start`` (place 0) to ``end`` (place 1) along a line."""
    return start + (end - start) * place


SHAPES: Final[Mapping[str, Shape]] = {"cos": cosine, "linear": linear}


def steps(step: int | Sequence[int], gamma: float, minimum: float | None) -> Curve:
    """``base * gamma ** n``, where n counts the steps until now, and never below ``minimum``.

    Args:
        step: the distance between two steps, or a list of their places.

    >>> curve = steps([2, 4], 0.5, None)
    >>> [curve(8.0, place, int) for place in range(5)]
    [8.0, 8.0, 4.0, 4.0, 2.0]
    """
    several: Any = step if isinstance(step, (list, tuple)) else [step]
    if not several or not all(type(one) is int for one in several):
        raise ConfigTypeError(
            f"step={short_repr(step)} must be an integer or a list of integers; write step=[8, 11]"
        )
    if any(one < 1 for one in several):
        raise ConfigError(f"step={short_repr(step)} must be above 0; write step=[8, 11]")
    require_number("gamma", gamma)
    return partial(_on_steps, step, gamma, minimum)


def _on_steps(
    step: int | Sequence[int], gamma: float, minimum: float | None, base: float, place: int, total: Total
) -> float:
    count = place // step if isinstance(step, int) else sum(place >= one for one in step)
    value = base * gamma**count
    return value if minimum is None else max(value, minimum)


def target(name: str, value: float | None, ratio: float | None) -> Callable[[float], float]:
    """The end of a curve, from its beginning: a number, or a ratio of that. Exactly one of them is given.

    Args:
        name: of the number in messages, such as ``"min_lr"``.
    """
    if (value is None) == (ratio is None):
        raise ConfigError(
            f"exactly one of {name}={short_repr(value)} and {name}_ratio={short_repr(ratio)} must be given; write {name}=0"
        )
    require_number(*((name, value) if ratio is None else (f"{name}_ratio", ratio)))
    return partial(_end, value, ratio)


def _end(value: float | None, ratio: float | None, base: float) -> float:
    return base * ratio if value is None else value  # type: ignore[operator]


def annealing(shape: Shape, name: str, value: float | None, ratio: float | None) -> Curve:
    """Over the whole run along :func:`cosine` or :func:`linear`, to the end that :func:`target` says."""
    return partial(_on_annealing, shape, target(name, value, ratio))


def _on_annealing(
    shape: Shape, end: Callable[[float], float], base: float, place: int, total: Total
) -> float:
    return shape(base, end(base), place / total())


def cycles(
    target_ratio: float | Sequence[float],
    cyclic_times: int,
    step_ratio_up: float,
    anneal_strategy: str,
    gamma: float,
) -> Curve:
    """Cycles up to ``base * up`` and down to ``base * down``; each one's excursion is ``gamma`` times the last one's.

    Args:
        target_ratio: ``(up, down)``; a single number means that and 1e-5 of it.
        cyclic_times: cycles in the run.
        step_ratio_up: the part of a cycle until its peak.
        anneal_strategy: ``"cos"`` or ``"linear"``.
    """
    given: Any = target_ratio if isinstance(target_ratio, (list, tuple)) else (target_ratio,)
    if len(given) not in (1, 2):
        raise ConfigError(
            f"target_ratio={short_repr(target_ratio)} must be one number or a pair; write (10, 1e-4)"
        )
    up = require_number("target_ratio", given[0])
    down = require_number("target_ratio", given[1]) if len(given) == 2 else up / 1e5
    require_count("cyclic_times", cyclic_times)
    if not 0 <= require_number("step_ratio_up", step_ratio_up) < 1:
        raise ConfigError(f"step_ratio_up={short_repr(step_ratio_up)} must be at least 0 and below 1")
    if not 0 < require_number("gamma", gamma) <= 1:
        raise ConfigError(f"gamma={short_repr(gamma)} must be above 0 and at most 1")
    return partial(_on_cycles, (up, down), cyclic_times, step_ratio_up, _shape_of(anneal_strategy), gamma)


def _on_cycles(
    ratios: tuple[float, float],
    times: int,
    ratio_up: float,
    shape: Shape,
    gamma: float,
    base: float,
    place: int,
    total: Total,
) -> float:
    up, down = ratios
    length = max(total() // times, 1)
    rise = int(ratio_up * length)
    cycle, inside = divmod(place, length)
    peak = base + base * (up - 1) * gamma**cycle
    if inside < rise:
        return shape(base, peak, inside / rise)
    return shape(peak, base * down, (inside - rise) / (length - rise))


def one_cycle(
    pct_start: float, anneal_strategy: str, three_phase: bool
) -> Callable[[tuple[float, float, float], int, int], float]:
    """Up in the first ``pct_start`` of the run, down in the rest; or up, back, and down to the very end.

    The curve joins three values (start, peak, end). Super-Convergence, Smith and Topin 2018 (arXiv:1708.07120); the places
    are those of ``torch``'s ``OneCycleLR``.
    """
    if isinstance(pct_start, bool) or not isinstance(pct_start, float) or not 0 <= pct_start <= 1:
        raise ConfigError(
            f"pct_start={short_repr(pct_start)} must be a float from 0 to 1; write pct_start=0.3"
        )
    require_flag("three_phase", three_phase)
    return partial(_on_one_cycle, pct_start, _shape_of(anneal_strategy), three_phase)


def _on_one_cycle(
    pct_start: float,
    shape: Shape,
    three_phase: bool,
    values: tuple[float, float, float],
    place: int,
    total: int,
) -> float:
    start, peak, end = values
    phases = [(float(pct_start * total) - 1, start, peak), (float(total - 1), peak, end)]
    if three_phase:
        back = float(2 * pct_start * total) - 2
        phases[1:] = [(back, peak, start), (float(total - 1), start, end)]
    before, (last, begin, goal) = 0.0, phases[0]
    for phase in phases[1:]:
        if place <= last:
            break
        before, (last, begin, goal) = last, phase
    return shape(begin, goal, (place - before) / (last - before) if last > before else 1.0)


def _shape_of(strategy: str) -> Shape:
    require_choice("anneal_strategy", strategy, SHAPES)
    return SHAPES[strategy]
