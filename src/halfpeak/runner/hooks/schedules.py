"""Hooks for schedules of learning rate and momentum. Compatible with mmcv 1.7.2.

:class:`UpdaterHook` determines when a schedule acts, on which groups, and how it warms up. The curves that rate and
momentum share are in :mod:`halfpeak.runner.hooks.curves`.

Longer than 500 lines because mmcv's policies are one list: rate and momentum differ only in names and defaults.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, TypeAlias

from torch import Tensor

from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_count, require_flag, require_number
from halfpeak.optim.base import momentum_of
from halfpeak.runner import optimizers
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.hook import Hook, RunnerView
from halfpeak.runner.hooks.curves import (
    Annealing,
    Curve,
    Cycles,
    Ends,
    OneCycle,
    Steps,
    Target,
    cosine,
    linear,
)

Values: TypeAlias = list[float] | dict[str, list[float]]
"""One number per group; a dict by name if there are several optimizers."""

_WARMUPS: Final = ("constant", "linear", "exp")


class UpdaterHook(Hook):
    """Sets one number, such as the learning rate, of every parameter group before each epoch or iteration.

    The number depends on the position in the run, not on the number that was set last. Schedules by iteration do not
    advance when an overflow skips a step (``runner.scheduled_iter``).

    Args:
        by_epoch: whether the schedule counts epochs rather than iterations.
        warmup: the curve of the warm-up factor: ``"constant"``, ``"linear"``, ``"exp"``, or None for no warm-up.
        warmup_iters: length of the warm-up.
        warmup_ratio: the factor at the start of the warm-up.
        warmup_by_epoch: whether ``warmup_iters`` counts epochs rather than iterations.

    Attributes:
        warmup_iters: length of the warm-up in iterations; with ``warmup_by_epoch`` None until the first epoch begins.
        warmup_epochs: the same in epochs with ``warmup_by_epoch``, otherwise None.
    """

    _curve: Curve | None = None
    """The curve of a policy that does not override ``get_lr`` or ``get_momentum``."""

    def __init__(
        self,
        by_epoch: bool = True,
        warmup: str | None = None,
        warmup_iters: int = 0,
        warmup_ratio: float = 0.1,
        warmup_by_epoch: bool = False,
    ) -> None:
        require_flag("by_epoch", by_epoch)
        require_flag("warmup_by_epoch", warmup_by_epoch)
        if warmup is not None:
            _check_warmup(warmup, warmup_iters, warmup_ratio)
        self.by_epoch = by_epoch
        self.warmup = warmup
        self.warmup_iters: int | None = None if warmup_by_epoch else warmup_iters
        self.warmup_epochs = warmup_iters if warmup_by_epoch else None
        self.warmup_ratio = warmup_ratio
        self.warmup_by_epoch = warmup_by_epoch
        self._base: dict[str, list[float]] = {}
        self._regular: Values = []
        self._epoch: int | None = None
        self._is_warming = warmup is not None

    @abstractmethod
    def _find_regular(self, runner: RunnerView) -> Values:
        """The scheduled values without warm-up."""

    @abstractmethod
    def _find_warm(self, place: int) -> Values:
        """The values of the warm-up after ``place`` iterations."""

    @abstractmethod
    def _assign(self, runner: RunnerView, values: Values) -> None:
        """Set the numbers of all groups."""

    @abstractmethod
    def _begin(self, group: dict[str, Any]) -> float:
        """The initial value of a group, stored in the group so that a checkpoint holds it."""

    @abstractmethod
    def _write(self, group: dict[str, Any], value: float) -> None:
        """Set the number in a group."""

    def before_run(self, runner: RunnerView) -> None:
        """Record the initial value of every group.

        Raises:
            OrderError: the runner has no optimizer.
        """
        named = optimizers.by_name(runner.optimizer)
        self._base = {name: [self._begin(group) for group in one.param_groups] for name, one in named.items()}
        self._epoch = None
        self._is_warming = self.warmup is not None
        if self.warmup_by_epoch:
            self.warmup_iters = None

    def before_train_epoch(self, runner: RunnerView) -> None:
        """Set the numbers, if the schedule counts epochs."""
        if self.by_epoch:
            self._epoch = None
            self._set(runner)

    def before_train_iter(self, runner: RunnerView) -> None:
        """Set the numbers, if the schedule counts iterations, is warming up, or has not been set in this epoch."""
        if not self.by_epoch or self._is_warming or self._epoch != runner.epoch:
            self._set(runner)

    def state_dict(self) -> dict[str, Any]:
        """The length of a finished warm-up, so that a skipped step, which lowers the position, does not restart it."""
        return (
            {"warmup_iters": self._warmup_length} if self.warmup is not None and not self._is_warming else {}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. A warm-up of another length depends on the position in the run."""
        self._is_warming = self.warmup is not None and state.get("warmup_iters") != self._warmup_length

    @property
    def _warmup_length(self) -> int | None:
        return self.warmup_epochs if self.warmup_by_epoch else self.warmup_iters

    def _set(self, runner: RunnerView) -> None:
        if self.warmup_iters is None:
            self.warmup_iters = (self.warmup_epochs or 0) * len(runner.data_loader)
        place = runner.scheduled_iter
        self._is_warming = self._is_warming and place < self.warmup_iters
        if not self.by_epoch or self._epoch != runner.epoch:
            # By epochs only once in each: an override may count its calls.
            self._regular = self._find_regular(runner)
        self._epoch = runner.epoch
        self._assign(runner, self._find_warm(place) if self._is_warming else self._regular)

    def _write_each(self, runner: RunnerView, values: Values) -> None:
        several = optimizers.by_name(runner.optimizer)
        by_name = optimizers.named(values, several)
        for name, one in several.items():
            for group, value in zip(one.param_groups, by_name[name], strict=False):
                self._write(group, value)

    def _place(self, runner: RunnerView) -> int:
        """The position of the schedule: finished epochs or iterations."""
        return runner.epoch if self.by_epoch else runner.scheduled_iter

    def _total(self, runner: RunnerView) -> int:
        """The length of the schedule, in epochs or iterations; ConfigError if the runner has none in this unit."""
        total = runner.max_epochs if self.by_epoch else runner.max_iters
        if total is None and self.by_epoch:
            raise ConfigError(
                f"{type(self).__name__} counts epochs, but the runner has no max_epochs; write by_epoch=False"
            )
        if total is None:
            raise ConfigError(
                f"{type(self).__name__} counts iterations, but the runner has no max_iters; give it max_iters=..."
            )
        return total

    def _on_curve(self, runner: RunnerView, base: float) -> float:
        if self._curve is None:
            raise ConfigError(
                f"{type(self).__name__} defines no value; override get_lr(self, runner, base_lr), or for a momentum "
                "get_momentum(self, runner, base_momentum)"
            )
        return self._curve(base, self._place(runner), lambda: self._total(runner))

    def _warmup_factor(self, place: int) -> float:
        """The factor of the warm-up after ``place`` iterations; it goes from ``warmup_ratio`` to 1."""
        if self.warmup == "constant":
            return self.warmup_ratio
        left = 1 - place / (self.warmup_iters or 1)
        return 1 - left * (1 - self.warmup_ratio) if self.warmup == "linear" else self.warmup_ratio**left

    def _by_group(self, number: Callable[[float], float]) -> Values:
        """One number per group, in the format of ``runner.current_lr``."""
        return optimizers.unnamed(
            {name: [number(base) for base in bases] for name, bases in self._base.items()}
        )


class LrUpdaterHook(UpdaterHook):
    """Base of learning-rate schedules: a subclass returns the rate from :meth:`get_lr`.

    Warm-up multiplies the rate by a factor that goes from ``warmup_ratio`` to 1. A subclass may override
    :meth:`get_regular_lr`, :meth:`get_warmup_lr` and ``_set_lr(runner, rates)`` too. See :class:`UpdaterHook` for the
    arguments.
    """

    def get_lr(self, runner: RunnerView, base_lr: float) -> float:
        """The current rate of a group whose initial rate is ``base_lr``."""
        return self._on_curve(runner, base_lr)

    def get_regular_lr(self, runner: RunnerView) -> Values:
        """The rate of each group without warm-up."""
        return self._by_group(lambda base: self.get_lr(runner, base))

    def get_warmup_lr(self, cur_iters: int) -> Values:
        """The rate of each group during warm-up, after ``cur_iters`` iterations."""
        factor = self._warmup_factor(cur_iters)
        return _each(self.regular_lr, lambda rate: rate * factor)

    @property
    def base_lr(self) -> Values:
        """The initial rate of each group. An override of ``before_run`` may set it."""
        return optimizers.unnamed(self._base)

    @base_lr.setter
    def base_lr(self, values: Values) -> None:
        self._base = _by_name(values)

    @property
    def regular_lr(self) -> Values:
        """The rate of each group without warm-up, of the last time that it was computed; at first an empty list."""
        return self._regular

    @regular_lr.setter
    def regular_lr(self, values: Values) -> None:
        self._regular = values

    def _set_lr(self, runner: RunnerView, lr_groups: Values) -> None:
        self._write_each(runner, lr_groups)

    def _assign(self, runner: RunnerView, values: Values) -> None:
        self._set_lr(runner, values)

    def _find_regular(self, runner: RunnerView) -> Values:
        return self.get_regular_lr(runner)

    def _find_warm(self, place: int) -> Values:
        return self.get_warmup_lr(place)

    def _begin(self, group: dict[str, Any]) -> float:
        return float(group.setdefault("initial_lr", float(group["lr"])))

    def _write(self, group: dict[str, Any], value: float) -> None:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)  # in place, because an optimizer in a CUDA graph reads this tensor
        else:
            group["lr"] = value


class MomentumUpdaterHook(UpdaterHook):
    """Base of momentum schedules: a subclass returns the momentum from :meth:`get_momentum`.

    Sets a group's ``momentum``, or the first of its ``betas``. Warm-up divides the momentum by a factor that goes from
    ``warmup_ratio`` to 1. A subclass may override :meth:`get_regular_momentum`, :meth:`get_warmup_momentum` and
    ``_set_momentum(runner, momenta)`` too. See :class:`UpdaterHook` for the arguments.
    """

    def __init__(
        self,
        by_epoch: bool = True,
        warmup: str | None = None,
        warmup_iters: int = 0,
        warmup_ratio: float = 0.9,
        warmup_by_epoch: bool = False,
    ) -> None:
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)

    def get_momentum(self, runner: RunnerView, base_momentum: float) -> float:
        """The current momentum of a group whose initial momentum is ``base_momentum``."""
        return self._on_curve(runner, base_momentum)

    def get_regular_momentum(self, runner: RunnerView) -> Values:
        """The momentum of each group without warm-up."""
        return self._by_group(lambda base: self.get_momentum(runner, base))

    def get_warmup_momentum(self, cur_iters: int) -> Values:
        """The momentum of each group during warm-up, after ``cur_iters`` iterations."""
        factor = self._warmup_factor(cur_iters)
        return _each(self.regular_momentum, lambda momentum: momentum / factor)

    @property
    def base_momentum(self) -> Values:
        """The initial momentum of each group. An override of ``before_run`` may set it."""
        return optimizers.unnamed(self._base)

    @base_momentum.setter
    def base_momentum(self, values: Values) -> None:
        self._base = _by_name(values)

    @property
    def regular_momentum(self) -> Values:
        """The momentum of each group without warm-up, of the last time that it was computed; at first an empty list."""
        return self._regular

    @regular_momentum.setter
    def regular_momentum(self, values: Values) -> None:
        self._regular = values

    def _set_momentum(self, runner: RunnerView, momentum_groups: Values) -> None:
        self._write_each(runner, momentum_groups)

    def _assign(self, runner: RunnerView, values: Values) -> None:
        self._set_momentum(runner, values)

    def _find_regular(self, runner: RunnerView) -> Values:
        return self.get_regular_momentum(runner)

    def _find_warm(self, place: int) -> Values:
        return self.get_warmup_momentum(place)

    def _begin(self, group: dict[str, Any]) -> float:
        _require_momentum(group)
        return group.setdefault("initial_momentum", momentum_of(group))

    def _write(self, group: dict[str, Any], value: float) -> None:
        if "momentum" in group:
            group["momentum"] = value
        else:
            group["betas"] = (value, *group["betas"][1:])


@HOOKS.register_module()
class FixedLrUpdaterHook(LrUpdaterHook):
    """A constant rate: the one that the optimizer was built with."""

    def get_lr(self, runner: RunnerView, base_lr: float) -> float:
        return base_lr


@HOOKS.register_module()
class ExpLrUpdaterHook(LrUpdaterHook):
    """Exponential decay: the rate is multiplied by ``gamma`` each epoch or iteration."""

    def __init__(self, gamma: float, **kwargs: Any) -> None:
        self.gamma = require_number("gamma", gamma)
        super().__init__(**kwargs)

    def get_lr(self, runner: RunnerView, base_lr: float) -> float:
        """``base_lr * gamma ** place``."""
        return base_lr * self.gamma ** self._place(runner)


@HOOKS.register_module()
class PolyLrUpdaterHook(LrUpdaterHook):
    """Polynomial decay: the rate follows a power of the remaining part of the run."""

    def __init__(self, power: float = 1.0, min_lr: float = 0.0, **kwargs: Any) -> None:
        self.power, self.min_lr = require_number("power", power), require_number("min_lr", min_lr)
        super().__init__(**kwargs)

    def get_lr(self, runner: RunnerView, base_lr: float) -> float:
        """``(base_lr - min_lr) * (1 - place / total) ** power + min_lr``."""
        left = (1 - self._place(runner) / self._total(runner)) ** self.power
        return (base_lr - self.min_lr) * left + self.min_lr


@HOOKS.register_module()
class InvLrUpdaterHook(LrUpdaterHook):
    """Inverse decay: the rate follows the inverse of a power of the position."""

    def __init__(self, gamma: float, power: float = 1.0, **kwargs: Any) -> None:
        self.gamma, self.power = require_number("gamma", gamma), require_number("power", power)
        super().__init__(**kwargs)

    def get_lr(self, runner: RunnerView, base_lr: float) -> float:
        """``base_lr * (1 + gamma * place) ** -power``."""
        return base_lr * (1 + self.gamma * self._place(runner)) ** -self.power


@HOOKS.register_module()
class StepLrUpdaterHook(LrUpdaterHook):
    """The rate is multiplied by ``gamma`` at each step; see :class:`~halfpeak.runner.hooks.curves.Steps`."""

    def __init__(
        self, step: int | Sequence[int], gamma: float = 0.1, min_lr: float | None = None, **kwargs: Any
    ) -> None:
        self.step, self.gamma, self.min_lr = step, gamma, min_lr
        self._curve = Steps(step, gamma, min_lr)
        super().__init__(**kwargs)


@HOOKS.register_module()
class StepMomentumUpdaterHook(MomentumUpdaterHook):
    """The momentum is multiplied by ``gamma`` at each step; see :class:`~halfpeak.runner.hooks.curves.Steps`."""

    def __init__(
        self, step: int | Sequence[int], gamma: float = 0.5, min_momentum: float | None = None, **kwargs: Any
    ) -> None:
        self._curve = Steps(step, gamma, min_momentum)
        super().__init__(**kwargs)


@HOOKS.register_module()
class CosineAnnealingLrUpdaterHook(LrUpdaterHook):
    """Half a cosine from the initial rate to ``min_lr``, or to ``min_lr_ratio`` times the initial rate."""

    def __init__(self, min_lr: float | None = None, min_lr_ratio: float | None = None, **kwargs: Any) -> None:
        self.min_lr, self.min_lr_ratio = min_lr, min_lr_ratio
        self._curve = Annealing(cosine, Target("min_lr", min_lr, min_lr_ratio))
        super().__init__(**kwargs)


@HOOKS.register_module()
class CosineAnnealingMomentumUpdaterHook(MomentumUpdaterHook):
    """Half a cosine from the initial momentum to ``min_momentum``, or to ``min_momentum_ratio`` times the initial."""

    def __init__(
        self, min_momentum: float | None = None, min_momentum_ratio: float | None = None, **kwargs: Any
    ) -> None:
        self._curve = Annealing(cosine, Target("min_momentum", min_momentum, min_momentum_ratio))
        super().__init__(**kwargs)


@HOOKS.register_module()
class LinearAnnealingLrUpdaterHook(LrUpdaterHook):
    """A line from the initial rate to ``min_lr``, or to ``min_lr_ratio`` times the initial rate."""

    def __init__(self, min_lr: float | None = None, min_lr_ratio: float | None = None, **kwargs: Any) -> None:
        self.min_lr, self.min_lr_ratio = min_lr, min_lr_ratio
        self._curve = Annealing(linear, Target("min_lr", min_lr, min_lr_ratio))
        super().__init__(**kwargs)


@HOOKS.register_module()
class LinearAnnealingMomentumUpdaterHook(MomentumUpdaterHook):
    """A line from the initial momentum to ``min_momentum``, or to ``min_momentum_ratio`` times the initial."""

    def __init__(
        self, min_momentum: float | None = None, min_momentum_ratio: float | None = None, **kwargs: Any
    ) -> None:
        self._curve = Annealing(linear, Target("min_momentum", min_momentum, min_momentum_ratio))
        super().__init__(**kwargs)


@HOOKS.register_module()
class FlatCosineAnnealingLrUpdaterHook(LrUpdaterHook):
    """The initial rate for the first ``start_percent`` (0 to 1) of the run, then half a cosine down."""

    def __init__(
        self,
        start_percent: float = 0.75,
        min_lr: float | None = None,
        min_lr_ratio: float | None = None,
        **kwargs: Any,
    ) -> None:
        if not 0 <= require_number("start_percent", start_percent) <= 1:
            raise ConfigError(
                f"start_percent={short_repr(start_percent)} must be from 0 to 1; write start_percent=0.75"
            )
        self.start_percent = start_percent
        self.min_lr, self.min_lr_ratio = min_lr, min_lr_ratio
        self._target = Target("min_lr", min_lr, min_lr_ratio)
        super().__init__(**kwargs)

    def get_lr(self, runner: RunnerView, base_lr: float) -> float:
        place, total = self._place(runner), self._total(runner)
        start = round(total * self.start_percent)
        if place < start:
            return base_lr
        return cosine(base_lr, self._target(base_lr), (place - start) / max(total - start, 1))


@HOOKS.register_module()
class CosineRestartLrUpdaterHook(LrUpdaterHook):
    """Half a cosine per period, from ``min + weight * (initial rate - min)`` down to the minimum.

    SGDR, Loshchilov and Hutter 2017 (arXiv:1608.03983).
    """

    def __init__(
        self,
        periods: Sequence[int],
        restart_weights: Sequence[float] = (1,),
        min_lr: float | None = None,
        min_lr_ratio: float | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(periods, (list, tuple)) or not all(type(one) is int and one > 0 for one in periods):
            raise ConfigError(
                f"periods={short_repr(periods)} must be a list of integers of 1 or more; write periods=[100, 200]"
            )
        if (
            not isinstance(restart_weights, (list, tuple))
            or len(periods) != len(restart_weights)
            or not periods
        ):
            raise ConfigError(
                f"periods={short_repr(periods)} and restart_weights={short_repr(restart_weights)} must be lists of the same "
                "length of 1 or more; give one weight per period"
            )
        self.periods, self.restart_weights = periods, restart_weights
        self._ends = list(accumulate(periods))
        self.min_lr, self.min_lr_ratio = min_lr, min_lr_ratio
        self._target = Target("min_lr", min_lr, min_lr_ratio)
        super().__init__(**kwargs)

    def get_lr(self, runner: RunnerView, base_lr: float) -> float:
        """The rate in the current period.

        Raises:
            ConfigError: the periods end before the run.
        """
        place = self._place(runner)
        number = bisect_right(self._ends, place)
        if number == len(self._ends):
            raise ConfigError(
                f"{'epoch' if self.by_epoch else 'iteration'} {place} is after the last of periods={list(self.periods)}; let "
                "them add up to the whole run"
            )
        lowest, period = self._target(base_lr), self.periods[number]
        highest = lowest + self.restart_weights[number] * (base_lr - lowest)
        return cosine(highest, lowest, (place - self._ends[number] + period) / period)


@HOOKS.register_module()
class CyclicLrUpdaterHook(LrUpdaterHook):
    """Cycles of the rate, up and down; see :class:`~halfpeak.runner.hooks.curves.Cycles`. By iterations only."""

    def __init__(
        self,
        by_epoch: bool = False,
        target_ratio: float | Sequence[float] = (10, 1e-4),
        cyclic_times: int = 1,
        step_ratio_up: float = 0.4,
        anneal_strategy: str = "cos",
        gamma: float = 1,
        **kwargs: Any,
    ) -> None:
        _require_iterations(by_epoch, "cyclic")
        self._curve = Cycles(target_ratio, cyclic_times, step_ratio_up, anneal_strategy, gamma)
        super().__init__(by_epoch=by_epoch, **kwargs)


@HOOKS.register_module()
class CyclicMomentumUpdaterHook(MomentumUpdaterHook):
    """Cycles of the momentum, down and up; see :class:`~halfpeak.runner.hooks.curves.Cycles`. By iterations only."""

    def __init__(
        self,
        by_epoch: bool = False,
        target_ratio: float | Sequence[float] = (0.85 / 0.95, 1.0),
        cyclic_times: int = 1,
        step_ratio_up: float = 0.4,
        anneal_strategy: str = "cos",
        gamma: float = 1,
        **kwargs: Any,
    ) -> None:
        _require_iterations(by_epoch, "cyclic")
        self._curve = Cycles(target_ratio, cyclic_times, step_ratio_up, anneal_strategy, gamma)
        super().__init__(by_epoch=by_epoch, **kwargs)


@HOOKS.register_module()
class OneCycleLrUpdaterHook(LrUpdaterHook):
    """One cycle up to ``max_lr`` and down; see :class:`~halfpeak.runner.hooks.curves.OneCycle`. By iterations only.

    Args:
        max_lr: the peak: a number, a list with one number per group, or a dict of these by optimizer.
        total_steps: length of the cycle; None means ``max_iters``.
        pct_start: the fraction of the cycle before the peak.
        anneal_strategy: ``"cos"`` or ``"linear"``.
        div_factor: peak divided by initial rate.
        final_div_factor: initial rate divided by final rate.
        three_phase: return to the initial rate as fast as it rose, then go down to the final rate.
        kwargs: passed to :class:`LrUpdaterHook`.
    """

    def __init__(
        self,
        max_lr: float | Sequence[float] | Mapping[str, Any],
        total_steps: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        div_factor: float = 25,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        **kwargs: Any,
    ) -> None:
        _require_iterations(kwargs.setdefault("by_epoch", False), "OneCycle")
        if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
            raise ConfigError(
                f"total_steps={short_repr(total_steps)} must be None or an integer of 1 or more"
            )
        self.max_lr, self.total_steps = max_lr, total_steps
        self.div_factor = require_number("div_factor", div_factor)
        self.final_div_factor = require_number("final_div_factor", final_div_factor)
        self._cycle = OneCycle(pct_start, anneal_strategy, three_phase)
        super().__init__(**kwargs)

    def before_run(self, runner: RunnerView) -> None:
        """Set the initial rate of every group to its peak divided by ``div_factor``.

        Raises:
            ConfigError: ``total_steps`` is less than the iterations of the run, or a group has no peak.
        """
        if self.total_steps is not None and self.total_steps < self._total(runner):
            raise ConfigError(
                f"total_steps={self.total_steps} is less than the {self._total(runner)} iterations of the run; leave it out, "
                "for the length of the run"
            )
        named = optimizers.by_name(runner.optimizer)
        for name, one in named.items():
            for index, group in enumerate(one.param_groups):
                group["initial_lr"] = _of_group("max_lr", self.max_lr, name, index) / self.div_factor
        super().before_run(runner)

    def get_lr(self, runner: RunnerView, base_lr: float) -> float:
        ends = Ends(start=base_lr, peak=base_lr * self.div_factor, end=base_lr / self.final_div_factor)
        return self._cycle(ends, self._place(runner), self.total_steps or self._total(runner))


@HOOKS.register_module()
class OneCycleMomentumUpdaterHook(MomentumUpdaterHook):
    """From ``max_momentum`` to ``base_momentum`` and back, opposite to the rate of ``OneCycleLrUpdaterHook``.

    Args:
        base_momentum: the minimum: a number, a list with one number per group, or a dict of these by optimizer.
        max_momentum: the initial and final momentum, in the same formats.
        pct_start: the fraction of the run before the minimum.
        anneal_strategy: ``"cos"`` or ``"linear"``.
        three_phase: return as fast as it fell, then stay at ``max_momentum``.
        kwargs: passed to :class:`MomentumUpdaterHook`.
    """

    def __init__(
        self,
        base_momentum: float | Sequence[float] | Mapping[str, Any] = 0.85,
        max_momentum: float | Sequence[float] | Mapping[str, Any] = 0.95,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        three_phase: bool = False,
        **kwargs: Any,
    ) -> None:
        _require_iterations(kwargs.setdefault("by_epoch", False), "OneCycle")
        self._lowest, self._highest = base_momentum, max_momentum
        self._cycle = OneCycle(pct_start, anneal_strategy, three_phase)
        super().__init__(**kwargs)

    def before_run(self, runner: RunnerView) -> None:
        """Set the initial momentum of every group to its maximum.

        Raises:
            ConfigError: a group has no momentum, or an argument has no number for it.
        """
        for name, one in optimizers.by_name(runner.optimizer).items():
            for index, group in enumerate(one.param_groups):
                _require_momentum(group)
                group["initial_momentum"] = _of_group("max_momentum", self._highest, name, index)
                group["base_momentum"] = _of_group("base_momentum", self._lowest, name, index)
        super().before_run(runner)

    def get_momentum(self, runner: RunnerView, base_momentum: float) -> float:
        """The current momentum, if ``base_momentum`` of the hook is one number for all groups."""
        return self._at(runner, base_momentum, _of_group("base_momentum", self._lowest, "", 0))

    def get_regular_momentum(self, runner: RunnerView) -> Values:
        several = optimizers.by_name(runner.optimizer)
        return optimizers.unnamed(
            {
                name: [
                    self._at(runner, highest, group["base_momentum"])
                    for group, highest in zip(several[name].param_groups, bases, strict=False)
                ]
                for name, bases in self._base.items()
            }
        )

    def _at(self, runner: RunnerView, highest: float, lowest: float) -> float:
        return self._cycle(Ends(highest, lowest, highest), self._place(runner), self._total(runner))


def _by_name(values: Values) -> dict[str, list[float]]:
    """The inverse of :func:`optimizers.unnamed` for numbers of groups."""
    return values if isinstance(values, dict) else {"": values}


def _each(values: Values, function: Callable[[float], float]) -> Values:
    if isinstance(values, Mapping):
        return {name: [function(value) for value in several] for name, several in values.items()}
    return [function(value) for value in values]


def _require_momentum(group: dict[str, Any]) -> None:
    if "momentum" not in group and "betas" not in group:
        raise ConfigError(
            "the optimizer has neither 'momentum' nor 'betas' for a momentum schedule; write momentum_config=None"
        )


def _require_iterations(by_epoch: bool, policy: str) -> None:
    """Raise ConfigError if a policy that only works by iterations is set to epochs."""
    if by_epoch:
        raise ConfigError(f"policy {short_repr(policy)} counts only iterations; write by_epoch=False")


def _of_group(name: str, values: Any, optimizer: str, index: int) -> float:
    """The number for one group, from one number for all, a list with one per group, or a dict of these by optimizer.

    ConfigError if ``values`` has no number for the group.
    """
    found: Any = values
    if isinstance(found, Mapping):
        found = found.get(optimizer)
    if isinstance(found, (list, tuple)):
        found = found[index] if index < len(found) else None
    if found is None:
        where = f" of optimizer {optimizer!r}" if optimizer else ""
        raise ConfigError(
            f"{name}={short_repr(values)} has no number for group {index}{where}; give one per group"
        )
    return require_number(name, found)


def _check_warmup(warmup: object, iters: object, ratio: object) -> None:
    if warmup not in _WARMUPS:
        raise ConfigError(
            f"warmup={short_repr(warmup)} must be None or one of {', '.join(map(repr, _WARMUPS))}"
        )
    require_count("warmup_iters", iters, hint="; write warmup_iters=500")
    if not 0 < require_number("warmup_ratio", ratio) <= 1:
        raise ConfigError(
            f"warmup_ratio={short_repr(ratio)} must be above 0 and at most 1; write warmup_ratio=0.1"
        )
