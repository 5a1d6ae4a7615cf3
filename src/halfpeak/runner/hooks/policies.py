"""Subclasses with a curve (``UpdaterHook.at``): each policy of mmcv 1.7.2 once, for learning rates and momenta."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, Final, TypeAlias

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_choice, require_count, require_flag, require_number
from halfpeak.runner import optimizers
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.hook import RunState
from halfpeak.runner.hooks.schedules import (
    LrUpdaterHook,
    MomentumUpdaterHook,
    PerGroup,
    UpdaterHook,
    Values,
    of_group,
)

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


@HOOKS.register_module()
@dataclass(eq=False)
class FixedLrUpdaterHook(LrUpdaterHook):
    """A constant rate: the one that the optimizer was built with."""

    def at(self, base: float, place: int, runner: RunState) -> float:
        return base


@dataclass(eq=False)
class StepPolicy(UpdaterHook):
    """``base * gamma ** n`` after n steps, and never below ``min_lr`` or ``min_momentum``.

    Args:
        step: the distance between two steps, or a list of the positions of all steps.
        gamma: the factor of each step.
    """

    finite: ClassVar[tuple[str, ...]] = ("gamma",)

    step: int | Sequence[int]
    gamma: float

    def __post_init__(self) -> None:
        super().__post_init__()
        shown = f"step={short_repr(self.step)}"
        several: Any = self.step if isinstance(self.step, (list, tuple)) else [self.step]
        if not several or not all(type(one) is int for one in several):
            raise ConfigTypeError(f"{shown} must be an integer or a list of integers; write step=[8, 11]")
        if any(one < 1 for one in several):
            raise ConfigError(f"{shown} must be above 0; write step=[8, 11]")

    def at(self, base: float, place: int, runner: RunState) -> float:
        step = self.step
        count = place // step if isinstance(step, int) else sum(place >= one for one in step)
        value, lowest = base * self.gamma**count, getattr(self, f"min_{self.number}")
        return value if lowest is None else max(value, lowest)


@HOOKS.register_module()
@dataclass(eq=False)
class StepLrUpdaterHook(LrUpdaterHook, StepPolicy):
    """Steps of the rate; see :class:`StepPolicy`."""

    gamma: float = 0.1
    min_lr: float | None = None


@HOOKS.register_module()
@dataclass(eq=False)
class StepMomentumUpdaterHook(MomentumUpdaterHook, StepPolicy):
    """Steps of the momentum; see :class:`StepPolicy`."""

    gamma: float = 0.5
    min_momentum: float | None = None


@HOOKS.register_module()
@dataclass(eq=False)
class ExpLrUpdaterHook(LrUpdaterHook):
    """Exponential decay: ``base * gamma ** place``."""

    finite: ClassVar[tuple[str, ...]] = ("gamma",)

    gamma: float

    def at(self, base: float, place: int, runner: RunState) -> float:
        return base * self.gamma**place


@HOOKS.register_module()
@dataclass(eq=False)
class PolyLrUpdaterHook(LrUpdaterHook):
    """Polynomial decay: ``(base - min_lr) * (1 - place / total) ** power + min_lr``."""

    finite: ClassVar[tuple[str, ...]] = ("power", "min_lr")

    power: float = 1.0
    min_lr: float = 0.0

    def at(self, base: float, place: int, runner: RunState) -> float:
        left = (1 - place / self._total(runner)) ** self.power
        return (base - self.min_lr) * left + self.min_lr


@HOOKS.register_module()
@dataclass(eq=False)
class InvLrUpdaterHook(LrUpdaterHook):
    """Inverse decay: ``base * (1 + gamma * place) ** -power``."""

    finite: ClassVar[tuple[str, ...]] = ("gamma", "power")

    gamma: float
    power: float = 1.0

    def at(self, base: float, place: int, runner: RunState) -> float:
        return base * (1 + self.gamma * place) ** -self.power


@dataclass(eq=False)
class TargetPolicy(UpdaterHook):
    """From the initial value to ``min_lr``, or ``min_lr_ratio`` times the initial rate; the same of momenta."""

    shape: ClassVar[str] = "cos"

    def __post_init__(self) -> None:
        super().__post_init__()
        name = f"min_{self.number}"
        self._lowest, self._ratio = getattr(self, name), getattr(self, f"{name}_ratio")
        if (self._lowest is None) == (self._ratio is None):
            raise ConfigError(
                f"exactly one of {name}={short_repr(self._lowest)} and {name}_ratio={short_repr(self._ratio)} must be given; "
                f"write {name}=0"
            )
        if self._ratio is None:
            require_number(name, self._lowest)
        else:
            require_number(f"{name}_ratio", self._ratio)

    def target(self, base: float) -> float:
        """The final value of a group with the initial value ``base``."""
        return self._lowest if self._ratio is None else base * self._ratio

    def at(self, base: float, place: int, runner: RunState) -> float:
        return SHAPES[self.shape](base, self.target(base), place / self._total(runner))


@HOOKS.register_module()
@dataclass(eq=False)
class CosineAnnealingLrUpdaterHook(LrUpdaterHook, TargetPolicy):
    """Half a cosine from the initial rate to ``min_lr``, or to ``min_lr_ratio`` times the initial rate."""

    min_lr: float | None = None
    min_lr_ratio: float | None = None


@HOOKS.register_module()
@dataclass(eq=False)
class CosineAnnealingMomentumUpdaterHook(MomentumUpdaterHook, TargetPolicy):
    """The same of the momentum."""

    min_momentum: float | None = None
    min_momentum_ratio: float | None = None


@HOOKS.register_module()
@dataclass(eq=False)
class LinearAnnealingLrUpdaterHook(LrUpdaterHook, TargetPolicy):
    """A line from the initial rate to ``min_lr``, or to ``min_lr_ratio`` times the initial rate."""

    shape: ClassVar[str] = "linear"

    min_lr: float | None = None
    min_lr_ratio: float | None = None


@HOOKS.register_module()
@dataclass(eq=False)
class LinearAnnealingMomentumUpdaterHook(MomentumUpdaterHook, TargetPolicy):
    """The same of the momentum."""

    shape: ClassVar[str] = "linear"

    min_momentum: float | None = None
    min_momentum_ratio: float | None = None


@HOOKS.register_module()
@dataclass(eq=False)
class FlatCosineAnnealingLrUpdaterHook(LrUpdaterHook, TargetPolicy):
    """The initial rate for the first ``start_percent`` (0 to 1) of the run, then half a cosine down."""

    start_percent: float = 0.75
    min_lr: float | None = None
    min_lr_ratio: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= require_number("start_percent", self.start_percent) <= 1:
            raise ConfigError(
                f"start_percent={short_repr(self.start_percent)} must be from 0 to 1; write start_percent=0.75"
            )

    def at(self, base: float, place: int, runner: RunState) -> float:
        total = self._total(runner)
        start = round(total * self.start_percent)
        if place < start:
            return base
        return cosine(base, self.target(base), (place - start) / max(total - start, 1))


@HOOKS.register_module()
@dataclass(eq=False)
class CosineRestartLrUpdaterHook(LrUpdaterHook, TargetPolicy):
    """Half a cosine per period, from ``min + weight * (initial rate - min)`` down to the minimum.

    SGDR, Loshchilov and Hutter 2017 (arXiv:1608.03983).
    """

    periods: Sequence[int]
    restart_weights: Sequence[float] = (1,)
    min_lr: float | None = None
    min_lr_ratio: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        periods: Any = self.periods
        weights: Any = self.restart_weights
        if not isinstance(periods, (list, tuple)) or not all(type(one) is int and one > 0 for one in periods):
            raise ConfigError(
                f"periods={short_repr(periods)} must be a list of integers of 1 or more; write periods=[100, 200]"
            )
        if not isinstance(weights, (list, tuple)) or len(periods) != len(weights) or not periods:
            raise ConfigError(
                f"periods={short_repr(periods)} and restart_weights={short_repr(weights)} must be lists of the same "
                "length of 1 or more; give one weight per period"
            )

    def at(self, base: float, place: int, runner: RunState) -> float:
        """The rate in the current period; ConfigError if the periods end before the run."""
        ends = list(accumulate(self.periods))
        number = bisect_right(ends, place)
        if number == len(ends):
            raise ConfigError(
                f"{'epoch' if self.by_epoch else 'iteration'} {place} is after the last of periods={list(self.periods)}; let "
                "them add up to the whole run"
            )
        lowest, period = self.target(base), self.periods[number]
        highest = lowest + self.restart_weights[number] * (base - lowest)
        return cosine(highest, lowest, (place - ends[number] + period) / period)


@dataclass(eq=False)
class CyclicPolicy(UpdaterHook):
    """Cycles to ``base * up`` and to ``base * down``; each rise is ``gamma`` times the previous rise. By iterations only.

    Cyclical Learning Rates, Smith 2017 (arXiv:1506.01186).

    Args:
        target_ratio: ``(up, down)``; a single number means ``(up, up / 1e5)``.
        cyclic_times: the number of cycles in the run.
        step_ratio_up: the fraction of a cycle before its peak.
        anneal_strategy: ``"cos"`` or ``"linear"``.
        gamma: above 0 and at most 1.
    """

    by_epoch: bool = False
    target_ratio: float | Sequence[float] = (1.0, 1.0)
    cyclic_times: int = 1
    step_ratio_up: float = 0.4
    anneal_strategy: str = "cos"
    gamma: float = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_iterations(self.by_epoch, "cyclic")
        ratio: Any = self.target_ratio
        given = ratio if isinstance(ratio, (list, tuple)) else (ratio,)
        if len(given) not in (1, 2):
            raise ConfigError(
                f"target_ratio={short_repr(ratio)} must be one number or a pair; write (10, 1e-4)"
            )
        self._up = require_number("target_ratio", given[0])
        self._down = require_number("target_ratio", given[1]) if len(given) == 2 else self._up / 1e5
        require_count("cyclic_times", self.cyclic_times)
        if not 0 <= require_number("step_ratio_up", self.step_ratio_up) < 1:
            raise ConfigError(
                f"step_ratio_up={short_repr(self.step_ratio_up)} must be at least 0 and below 1"
            )
        if not 0 < require_number("gamma", self.gamma) <= 1:
            raise ConfigError(f"gamma={short_repr(self.gamma)} must be above 0 and at most 1")
        require_choice("anneal_strategy", self.anneal_strategy, SHAPES)

    def at(self, base: float, place: int, runner: RunState) -> float:
        shape = SHAPES[self.anneal_strategy]
        length = max(self._total(runner) // self.cyclic_times, 1)
        rise = int(self.step_ratio_up * length)
        cycle, inside = divmod(place, length)
        peak = base + base * (self._up - 1) * self.gamma**cycle
        if inside < rise:
            return shape(base, peak, inside / rise)
        return shape(peak, base * self._down, (inside - rise) / (length - rise))


@HOOKS.register_module()
@dataclass(eq=False)
class CyclicLrUpdaterHook(LrUpdaterHook, CyclicPolicy):
    """Cycles of the rate, up and down; see :class:`CyclicPolicy`."""

    by_epoch: bool = False
    target_ratio: float | Sequence[float] = (10, 1e-4)


@HOOKS.register_module()
@dataclass(eq=False)
class CyclicMomentumUpdaterHook(MomentumUpdaterHook, CyclicPolicy):
    """Cycles of the momentum, down and up; see :class:`CyclicPolicy`."""

    by_epoch: bool = False
    target_ratio: float | Sequence[float] = (0.85 / 0.95, 1.0)


class OneCyclePolicy(UpdaterHook):
    """From start to peak in the first ``pct_start`` of the cycle, then to the end; with ``three_phase`` over the start again.

    Super-Convergence, Smith and Topin 2018 (arXiv:1708.07120); positions are the same as in torch's ``OneCycleLR``. By
    iterations only.

    Args:
        pct_start: the fraction of the cycle before the peak.
        anneal_strategy: ``"cos"`` or ``"linear"``.
        three_phase: return to the start as fast as it was left, then go to the end.
    """

    pct_start: float
    anneal_strategy: str
    three_phase: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_iterations(self.by_epoch, "OneCycle")
        if not isinstance(self.pct_start, float) or not 0 <= self.pct_start <= 1:
            raise ConfigError(
                f"pct_start={short_repr(self.pct_start)} must be a float from 0 to 1, such as 0.3"
            )
        require_choice("anneal_strategy", self.anneal_strategy, SHAPES)
        require_flag("three_phase", self.three_phase)

    def _cycle(self, start: float, peak: float, end: float, place: int, total: int) -> float:
        """The value after ``place`` of ``total`` iterations."""
        turn = float(self.pct_start * total)
        phases = [(turn - 1, start, peak), (float(total - 1), peak, end)]
        if self.three_phase:
            phases[1:] = [(2 * turn - 2, peak, start), (float(total - 1), start, end)]
        begun, (ends, low, high) = 0.0, phases[0]
        for phase in phases[1:]:
            if place <= ends:
                break
            begun, (ends, low, high) = ends, phase
        shape = SHAPES[self.anneal_strategy]
        return shape(low, high, (place - begun) / (ends - begun) if ends > begun else 1.0)


@HOOKS.register_module()
@dataclass(eq=False)
class OneCycleLrUpdaterHook(LrUpdaterHook, OneCyclePolicy):
    """One cycle up to ``max_lr`` and down; see :class:`OneCyclePolicy`.

    Args:
        max_lr: the peak.
        total_steps: length of the cycle; None means ``max_iters``.
        div_factor: peak divided by initial rate.
        final_div_factor: initial rate divided by final rate.
    """

    finite: ClassVar[tuple[str, ...]] = ("div_factor", "final_div_factor")

    max_lr: PerGroup
    total_steps: int | None = None
    pct_start: float = 0.3
    anneal_strategy: str = "cos"
    div_factor: float = 25
    final_div_factor: float = 1e4
    three_phase: bool = False
    by_epoch: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_steps is not None and (type(self.total_steps) is not int or self.total_steps < 1):
            raise ConfigError(
                f"total_steps={short_repr(self.total_steps)} must be None or an integer of 1 or more"
            )

    def before_run(self, runner: RunState) -> None:
        """Set the initial rate of every group to its peak divided by ``div_factor``.

        Raises:
            ConfigError: ``total_steps`` is less than the iterations of the run, or a group has no peak.
        """
        if self.total_steps is not None and self.total_steps < self._total(runner):
            raise ConfigError(
                f"total_steps={self.total_steps} is less than the {self._total(runner)} iterations of the run; leave it out, "
                "for the length of the run"
            )
        for name, one in optimizers.by_name(runner.optimizer).items():
            for index, group in enumerate(one.param_groups):
                group["initial_lr"] = of_group("max_lr", self.max_lr, name, index) / self.div_factor
        super().before_run(runner)

    def at(self, base: float, place: int, runner: RunState) -> float:
        peak, end = base * self.div_factor, base / self.final_div_factor
        return self._cycle(base, peak, end, place, self.total_steps or self._total(runner))


@HOOKS.register_module()
@dataclass(eq=False)
class OneCycleMomentumUpdaterHook(MomentumUpdaterHook, OneCyclePolicy):
    """From ``max_momentum`` to ``base_momentum`` and back, opposite to the rate; see :class:`OneCyclePolicy`.

    Args:
        base_momentum: the minimum.
        max_momentum: the initial and final momentum.
    """

    base_momentum: Any = 0.85
    max_momentum: PerGroup = 0.95
    pct_start: float = 0.3
    anneal_strategy: str = "cos"
    three_phase: bool = False
    by_epoch: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lowest = self.base_momentum  # becomes the initial momenta of the groups, as in all schedules

    def before_run(self, runner: RunState) -> None:
        """Set the initial momentum of every group to its maximum.

        Raises:
            ConfigError: a group has no momentum, or an argument has no number for it.
        """
        for name, one in optimizers.by_name(runner.optimizer).items():
            for index, group in enumerate(one.param_groups):
                group["initial_momentum"] = of_group("max_momentum", self.max_momentum, name, index)
                group["base_momentum"] = of_group("base_momentum", self._lowest, name, index)
        super().before_run(runner)

    def at(self, base: float, place: int, runner: RunState) -> float:
        """The current momentum, if ``base_momentum`` of the hook is one number for all groups."""
        lowest = of_group("base_momentum", self._lowest, "", 0)
        return self._cycle(base, lowest, base, place, self._total(runner))

    def get_regular_momentum(self, runner: RunState) -> Values:
        place, total = self._place(runner), self._total(runner)

        def current(group: Mapping[str, Any]) -> float:
            highest = group["initial_momentum"]
            return self._cycle(highest, group["base_momentum"], highest, place, total)

        return self._each_group(runner, current)


def _require_iterations(by_epoch: bool, policy: str) -> None:
    """Raise ConfigError if a policy that only works by iterations is set to epochs."""
    if by_epoch:
        raise ConfigError(f"policy {short_repr(policy)} counts only iterations; write by_epoch=False")
