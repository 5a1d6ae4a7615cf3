"""Schedules of the momentum. Answers to mmcv 1.7.2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from halfpeak.core.errors import ConfigError
from halfpeak.runner import optimizers
from halfpeak.runner.hooks.curves import Cycles, OneCycle, Steps, Target, cosine, linear
from halfpeak.runner.hooks.updater import UpdaterHook, Values, of_group, require_iterations

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner


class MomentumUpdaterHook(UpdaterHook):
    """Base of the schedules: a subclass says in :meth:`get_momentum` what it is.

    Sets ``momentum`` of a group, or the first of its ``betas``. Warm-up divides it by a factor that goes from
    ``warmup_ratio`` to 1. For the arguments see :class:`~halfpeak.runner.hooks.updater.UpdaterHook`.
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

    @abstractmethod
    def get_momentum(self, runner: BaseRunner, base_momentum: float) -> float:
        """The momentum now, of a group that begins with ``base_momentum``."""

    def get_regular_momentum(self, runner: BaseRunner) -> Values:
        """The momentum of each group without warm-up."""
        return self._by_group(runner, lambda base: self.get_momentum(runner, base))

    @property
    def base_momentum(self) -> Values:
        """What each group began with."""
        return optimizers.unnamed(self._base)

    def _value(self, runner: BaseRunner, group: dict[str, Any], base: float) -> float:
        return self.get_momentum(runner, base)

    def _begin(self, group: dict[str, Any]) -> float:
        _require_momentum(group)
        return group.setdefault("initial_momentum", optimizers.momentum_of(group))

    def _write(self, group: dict[str, Any], value: float) -> None:
        if "momentum" in group:
            group["momentum"] = value
        else:
            group["betas"] = (value, *group["betas"][1:])

    def _warm(self, value: float, factor: float) -> float:
        return value / factor


class StepMomentumUpdaterHook(MomentumUpdaterHook):
    """The momentum times ``gamma`` at each step; see :class:`~halfpeak.runner.hooks.curves.Steps`."""

    def __init__(
        self, step: int | Sequence[int], gamma: float = 0.5, min_momentum: float | None = None, **kwargs: Any
    ) -> None:
        self._curve = Steps(step, gamma, min_momentum)
        super().__init__(**kwargs)

    def get_momentum(self, runner: BaseRunner, base_momentum: float) -> float:
        """``base_momentum * gamma ** steps``."""
        return self._curve(base_momentum, self._place(runner))


class CosineAnnealingMomentumUpdaterHook(MomentumUpdaterHook):
    """Half a cosine from the momentum to ``min_momentum``, or to ``min_momentum_ratio`` of it."""

    def __init__(
        self, min_momentum: float | None = None, min_momentum_ratio: float | None = None, **kwargs: Any
    ) -> None:
        self._target = Target("min_momentum", min_momentum, min_momentum_ratio)
        super().__init__(**kwargs)

    def get_momentum(self, runner: BaseRunner, base_momentum: float) -> float:
        """The momentum on the curve."""
        return cosine(base_momentum, self._target(base_momentum), self._place(runner) / self._total(runner))


class LinearAnnealingMomentumUpdaterHook(MomentumUpdaterHook):
    """A line from the momentum to ``min_momentum``, or to ``min_momentum_ratio`` of it."""

    def __init__(
        self, min_momentum: float | None = None, min_momentum_ratio: float | None = None, **kwargs: Any
    ) -> None:
        self._target = Target("min_momentum", min_momentum, min_momentum_ratio)
        super().__init__(**kwargs)

    def get_momentum(self, runner: BaseRunner, base_momentum: float) -> float:
        """The momentum on the line."""
        return linear(base_momentum, self._target(base_momentum), self._place(runner) / self._total(runner))


class CyclicMomentumUpdaterHook(MomentumUpdaterHook):
    """Down and up again, several times; see :class:`~halfpeak.runner.hooks.curves.Cycles`. By iterations only."""

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
        require_iterations(by_epoch, "cyclic")
        self._curve = Cycles(target_ratio, cyclic_times, step_ratio_up, anneal_strategy, gamma)
        super().__init__(by_epoch, **kwargs)

    def get_momentum(self, runner: BaseRunner, base_momentum: float) -> float:
        """The momentum on the curve."""
        return self._curve(base_momentum, self._place(runner), self._total(runner))


class OneCycleMomentumUpdaterHook(MomentumUpdaterHook):
    """From ``max_momentum`` to ``base_momentum`` and back, against the rate of ``OneCycleLrUpdaterHook``.

    Args:
        base_momentum: the lowest; a number, a list with one per group, or a dict of these by optimizer.
        max_momentum: the first and the last.
        pct_start: part of the run until the lowest.
        anneal_strategy: ``"cos"`` or ``"linear"``.
        three_phase: come back as fast as it fell, then stay.
        kwargs: of :class:`MomentumUpdaterHook`.
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
        require_iterations(kwargs.setdefault("by_epoch", False), "OneCycle")
        self._lowest, self._highest = base_momentum, max_momentum
        self._curve = OneCycle(pct_start, anneal_strategy, three_phase)
        super().__init__(**kwargs)

    def before_run(self, runner: BaseRunner) -> None:
        """Let every group begin with its highest momentum.

        Raises:
            ConfigError: a group has no momentum, or none was given for it.
        """
        for name, one in optimizers.by_name(runner.optimizer).items():
            for index, group in enumerate(one.param_groups):
                _require_momentum(group)
                group["initial_momentum"] = of_group("max_momentum", self._highest, name, index)
                group["base_momentum"] = of_group("base_momentum", self._lowest, name, index)
        super().before_run(runner)

    def get_momentum(self, runner: BaseRunner, base_momentum: float) -> float:
        """The momentum on the curve, where one lowest is given for all groups."""
        return self._at(runner, base_momentum, of_group("base_momentum", self._lowest, "", 0))

    def _value(self, runner: BaseRunner, group: dict[str, Any], base: float) -> float:
        return self._at(runner, base, group["base_momentum"])

    def _at(self, runner: BaseRunner, highest: float, lowest: float) -> float:
        ends = {"start": highest, "peak": lowest, "end": highest}
        return self._curve(ends, self._place(runner), self._total(runner))


def _require_momentum(group: dict[str, Any]) -> None:
    if "momentum" not in group and "betas" not in group:
        raise ConfigError(
            "the optimizer has neither 'momentum' nor 'betas' for a momentum schedule; write momentum_config=None"
        )
