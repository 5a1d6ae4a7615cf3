"""Schedules of the learning rate. Answers to mmcv 1.7.2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from halfpeak.core.errors import ConfigError
from halfpeak.runner import optimizers
from halfpeak.runner.hooks.curves import (
    Cycles,
    OneCycle,
    Restarts,
    Steps,
    Target,
    cosine,
    linear,
    require_number,
)
from halfpeak.runner.hooks.updater import UpdaterHook, Values, of_group, require_iterations

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner


class LrUpdaterHook(UpdaterHook):
    """Base of the schedules: a subclass says in :meth:`get_lr` what the rate is.

    Warm-up multiplies the rate by a factor that goes from ``warmup_ratio`` to 1. For the arguments see
    :class:`~halfpeak.runner.hooks.updater.UpdaterHook`.
    """

    @abstractmethod
    def get_lr(self, runner: BaseRunner, base_lr: float) -> float:
        """The rate now, of a group that begins with ``base_lr``."""

    def get_regular_lr(self, runner: BaseRunner) -> Values:
        """The rate of each group without warm-up."""
        return self._by_group(runner, lambda base: self.get_lr(runner, base))

    @property
    def base_lr(self) -> Values:
        """What each group began with."""
        return optimizers.unnamed(self._base)

    def _value(self, runner: BaseRunner, group: dict[str, Any], base: float) -> float:
        return self.get_lr(runner, base)

    def _begin(self, group: dict[str, Any]) -> float:
        return float(group.setdefault("initial_lr", float(group["lr"])))

    def _write(self, group: dict[str, Any], value: float) -> None:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)  # a captured optimizer reads this very tensor
        else:
            group["lr"] = value

    def _warm(self, value: float, factor: float) -> float:
        return value * factor


class FixedLrUpdaterHook(LrUpdaterHook):
    """The rate that the optimizer was built with."""

    def get_lr(self, runner: BaseRunner, base_lr: float) -> float:
        """``base_lr``."""
        return base_lr


class StepLrUpdaterHook(LrUpdaterHook):
    """The rate times ``gamma`` at each step; see :class:`~halfpeak.runner.hooks.curves.Steps`."""

    def __init__(
        self, step: int | Sequence[int], gamma: float = 0.1, min_lr: float | None = None, **kwargs: Any
    ) -> None:
        self._curve = Steps(step, gamma, min_lr)
        super().__init__(**kwargs)

    def get_lr(self, runner: BaseRunner, base_lr: float) -> float:
        """``base_lr * gamma ** steps``."""
        return self._curve(base_lr, self._place(runner))


class ExpLrUpdaterHook(LrUpdaterHook):
    """The rate times ``gamma`` each epoch or iteration."""

    def __init__(self, gamma: float, **kwargs: Any) -> None:
        self.gamma = require_number("gamma", gamma)
        super().__init__(**kwargs)

    def get_lr(self, runner: BaseRunner, base_lr: float) -> float:
        """``base_lr * gamma ** place``."""
        return base_lr * self.gamma ** self._place(runner)


class PolyLrUpdaterHook(LrUpdaterHook):
    """A power of what is left of the run."""

    def __init__(self, power: float = 1.0, min_lr: float = 0.0, **kwargs: Any) -> None:
        self.power, self.min_lr = require_number("power", power), require_number("min_lr", min_lr)
        super().__init__(**kwargs)

    def get_lr(self, runner: BaseRunner, base_lr: float) -> float:
        """``(base_lr - min_lr) * (1 - place / total) ** power + min_lr``."""
        left = (1 - self._place(runner) / self._total(runner)) ** self.power
        return (base_lr - self.min_lr) * left + self.min_lr


class InvLrUpdaterHook(LrUpdaterHook):
    """The inverse of a power of the time."""

    def __init__(self, gamma: float, power: float = 1.0, **kwargs: Any) -> None:
        self.gamma, self.power = require_number("gamma", gamma), require_number("power", power)
        super().__init__(**kwargs)

    def get_lr(self, runner: BaseRunner, base_lr: float) -> float:
        """``base_lr * (1 + gamma * place) ** -power``."""
        return base_lr * (1 + self.gamma * self._place(runner)) ** -self.power


class CosineAnnealingLrUpdaterHook(LrUpdaterHook):
    """Half a cosine from the rate down to ``min_lr``, or to ``min_lr_ratio`` of it."""

    def __init__(self, min_lr: float | None = None, min_lr_ratio: float | None = None, **kwargs: Any) -> None:
        self._target = Target("min_lr", min_lr, min_lr_ratio)
        super().__init__(**kwargs)

    def get_lr(self, runner: BaseRunner, base_lr: float) -> float:
        """The rate on the curve."""
        return cosine(base_lr, self._target(base_lr), self._place(runner) / self._total(runner))


class LinearAnnealingLrUpdaterHook(LrUpdaterHook):
    """A line from the rate down to ``min_lr``, or to ``min_lr_ratio`` of it."""

    def __init__(self, min_lr: float | None = None, min_lr_ratio: float | None = None, **kwargs: Any) -> None:
        self._target = Target("min_lr", min_lr, min_lr_ratio)
        super().__init__(**kwargs)

    def get_lr(self, runner: BaseRunner, base_lr: float) -> float:
        """The rate on the line."""
        return linear(base_lr, self._target(base_lr), self._place(runner) / self._total(runner))


class FlatCosineAnnealingLrUpdaterHook(LrUpdaterHook):
    """The rate as it is for the first ``start_percent`` of the run, then half a cosine down."""

    def __init__(
        self,
        start_percent: float = 0.75,
        min_lr: float | None = None,
        min_lr_ratio: float | None = None,
        **kwargs: Any,
    ) -> None:
        if not 0 <= require_number("start_percent", start_percent) <= 1:
            raise ConfigError(
                f"start_percent={start_percent!r} must be from 0 to 1; write start_percent=0.75"
            )
        self.start_percent = start_percent
        self._target = Target("min_lr", min_lr, min_lr_ratio)
        super().__init__(**kwargs)

    def get_lr(self, runner: BaseRunner, base_lr: float) -> float:
        """The rate on the curve."""
        total = self._total(runner)
        start = round(total * self.start_percent)
        place = self._place(runner) - start
        return base_lr if place < 0 else cosine(base_lr, self._target(base_lr), place / max(total - start, 1))


class CosineRestartLrUpdaterHook(LrUpdaterHook):
    """Half a cosine per period; see :class:`~halfpeak.runner.hooks.curves.Restarts`."""

    def __init__(
        self,
        periods: Sequence[int],
        restart_weights: Sequence[float] = (1,),
        min_lr: float | None = None,
        min_lr_ratio: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._curve = Restarts(periods, restart_weights)
        self._target = Target("min_lr", min_lr, min_lr_ratio)
        super().__init__(**kwargs)

    def get_lr(self, runner: BaseRunner, base_lr: float) -> float:
        """The rate on the curve.

        Raises:
            ConfigError: the periods are over and the run is not.
        """
        return self._curve(base_lr, self._target(base_lr), self._place(runner))


class CyclicLrUpdaterHook(LrUpdaterHook):
    """Up and down again, several times; see :class:`~halfpeak.runner.hooks.curves.Cycles`. By iterations only."""

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
        require_iterations(by_epoch, "cyclic")
        self._curve = Cycles(target_ratio, cyclic_times, step_ratio_up, anneal_strategy, gamma)
        super().__init__(by_epoch, **kwargs)

    def get_lr(self, runner: BaseRunner, base_lr: float) -> float:
        """The rate on the curve."""
        return self._curve(base_lr, self._place(runner), self._total(runner))


class OneCycleLrUpdaterHook(LrUpdaterHook):
    """Up to ``max_lr`` and down; see :class:`~halfpeak.runner.hooks.curves.OneCycle`. By iterations only.

    Args:
        max_lr: the peak; a number, a list with one per group, or a dict of these by optimizer.
        total_steps: length of the cycle; None means ``max_iters``.
        pct_start: part of it until the peak.
        anneal_strategy: ``"cos"`` or ``"linear"``.
        div_factor: the peak over the first rate.
        final_div_factor: the first rate over the last one.
        three_phase: come back to the first rate as fast as it rose, then go down.
        kwargs: of :class:`LrUpdaterHook`.
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
        require_iterations(kwargs.setdefault("by_epoch", False), "OneCycle")
        if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
            raise ConfigError(f"total_steps={total_steps!r} must be None or an integer of 1 or more")
        self.max_lr, self.total_steps = max_lr, total_steps
        self.div_factor = require_number("div_factor", div_factor)
        self.final_div_factor = require_number("final_div_factor", final_div_factor)
        self._curve = OneCycle(pct_start, anneal_strategy, three_phase)
        super().__init__(**kwargs)

    def before_run(self, runner: BaseRunner) -> None:
        """Let every group begin with its peak over ``div_factor``.

        Raises:
            ConfigError: ``total_steps`` is less than the run has, or a group has no peak.
        """
        if self.total_steps is not None and self.total_steps < self._total(runner):
            raise ConfigError(
                f"total_steps={self.total_steps} is less than the {self._total(runner)} iterations of the run"
            )
        named = optimizers.by_name(runner.optimizer)
        for name, one in named.items():
            for index, group in enumerate(one.param_groups):
                group["initial_lr"] = of_group("max_lr", self.max_lr, name, index) / self.div_factor
        super().before_run(runner)

    def get_lr(self, runner: BaseRunner, base_lr: float) -> float:
        """The rate on the curve."""
        ends = {"start": base_lr, "peak": base_lr * self.div_factor, "end": base_lr / self.final_div_factor}
        return self._curve(ends, self._place(runner), self.total_steps or self._total(runner))
