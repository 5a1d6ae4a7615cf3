"""The bases of schedules of learning rate and momentum: when they act, on which groups, and how they warm up.

Compatible with mmcv 1.7.2. The policies are in :mod:`halfpeak.runner.hooks.policies`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

from torch import Tensor

from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_count, require_flag, require_number
from halfpeak.optim.base import momentum_of
from halfpeak.runner import optimizers
from halfpeak.runner.hook import Hook, RunState

Values: TypeAlias = list[float] | dict[str, list[float]]
"""One number per group; a dict by name if there are several optimizers."""

PerGroup: TypeAlias = float | Sequence[float] | Mapping[str, Any]
"""One number for all groups, a list with one per group, or a dict of these by optimizer."""

_WARMUPS: Final = ("constant", "linear", "exp")


@dataclass(kw_only=True, eq=False)
class UpdaterHook(Hook):
    """Sets one number, the learning rate or the momentum, of every parameter group before each epoch or iteration.

    The number depends on the position in the run, not on the number that was set last. Schedules by iteration do not
    advance when an overflow skips a step (``runner.scheduled_iter``). A subclass may override the methods under their names
    in mmcv, with ``lr`` or ``momentum`` for ``*``: ``get_*``, ``get_regular_*``, ``get_warmup_*`` and ``_set_*``, and set
    ``base_*`` and ``regular_*``.

    Args:
        by_epoch: whether the schedule counts epochs rather than iterations.
        warmup: the curve of the warm-up factor: ``"constant"``, ``"linear"``, ``"exp"``, or None for no warm-up.
        warmup_iters: length of the warm-up. The attribute counts iterations, and with ``warmup_by_epoch`` it is None until
            the first epoch begins.
        warmup_ratio: the factor at the start of the warm-up.
        warmup_by_epoch: whether ``warmup_iters`` counts epochs rather than iterations.
    """

    number: ClassVar[str]
    """``"lr"`` or ``"momentum"``."""
    finite: ClassVar[tuple[str, ...]] = ()
    """The arguments that must be finite numbers."""

    by_epoch: bool = True
    warmup: str | None = None
    warmup_iters: int | None = 0
    warmup_ratio: float = 0.1
    warmup_by_epoch: bool = False

    def __post_init__(self) -> None:
        for name in self.finite:
            require_number(name, getattr(self, name))
        require_flag("by_epoch", self.by_epoch)
        require_flag("warmup_by_epoch", self.warmup_by_epoch)
        if self.warmup is not None:
            _check_warmup(self.warmup, self.warmup_iters, self.warmup_ratio)
        self.warmup_epochs = self.warmup_iters if self.warmup_by_epoch else None
        if self.warmup_by_epoch:
            self.warmup_iters = None
        self._epoch: int | None = None

    def at(self, base: float, place: int, runner: RunState) -> float:
        """The value of the curve after ``place`` epochs or iterations, for a group with the initial value ``base``."""
        raise ConfigError(
            f"{type(self).__name__} defines no value; override get_{self.number}(self, runner, base_{self.number})"
        )

    def before_run(self, runner: RunState) -> None:
        """Record the initial value of every group, in the group too, so that a checkpoint holds it.

        Raises:
            OrderError: the runner has no optimizer.
            ConfigError: a group has no such number.
        """
        setattr(self, f"base_{self.number}", self._each_group(runner, self._begin))
        self._epoch = None
        if self.warmup_by_epoch:
            self.warmup_iters = None

    def before_train_epoch(self, runner: RunState) -> None:
        """Set the numbers, if the schedule counts epochs."""
        if self.by_epoch:
            self._set(runner, renew=True)

    def before_train_iter(self, runner: RunState) -> None:
        """Set the numbers, if the schedule counts iterations, is warming up, or the epoch has changed."""
        if not self.by_epoch or self._epoch != runner.epoch:
            self._set(runner, renew=True)
        elif self.warmup is not None and runner.scheduled_iter <= (self.warmup_iters or 0):
            self._set(runner, renew=False)

    def _set(self, runner: RunState, *, renew: bool) -> None:
        """Set the numbers; by epochs they are computed anew once in each, because an override may count its calls."""
        if self.warmup_iters is None:
            self.warmup_iters = (self.warmup_epochs or 0) * len(runner.data_loader)
        regular = f"regular_{self.number}"
        if renew:
            self._epoch = runner.epoch
            setattr(self, regular, getattr(self, f"get_{regular}")(runner))
        values = getattr(self, regular)
        if self.warmup is not None and (place := runner.scheduled_iter) < self.warmup_iters:
            values = getattr(self, f"get_warmup_{self.number}")(place)
        getattr(self, f"_set_{self.number}")(runner, values)

    @abstractmethod
    def _begin(self, group: dict[str, Any]) -> float:
        """The initial value of a group. A subclass for each number defines it."""

    @abstractmethod
    def _write(self, group: dict[str, Any], value: float) -> None:
        """Set the number of a group. A subclass for each number defines it."""

    def _each_group(self, runner: RunState, value: Callable[[dict[str, Any]], float]) -> Values:
        named = optimizers.by_name(runner.optimizer).items()
        return optimizers.unnamed({name: [value(group) for group in one.param_groups] for name, one in named})

    def _write_each(self, runner: RunState, values: Values) -> None:
        several = optimizers.by_name(runner.optimizer)
        by_name = optimizers.named(values, several)
        for name, one in several.items():
            for group, value in zip(one.param_groups, by_name[name], strict=False):
                self._write(group, value)

    def _place(self, runner: RunState) -> int:
        """The position of the schedule: finished epochs or iterations."""
        return runner.epoch if self.by_epoch else runner.scheduled_iter

    def _total(self, runner: RunState) -> int:
        """The length of the schedule, in epochs or iterations; ConfigError if the runner has none in this unit."""
        total = runner.max_epochs if self.by_epoch else runner.max_iters
        if total is None:
            unit, length = ("epochs", "max_epochs") if self.by_epoch else ("iterations", "max_iters")
            remedy = "write by_epoch=False" if self.by_epoch else "give it max_iters=..."
            raise ConfigError(
                f"{type(self).__name__} counts {unit}, but the runner has no {length}; {remedy}"
            )
        return total

    def _warmup_factor(self, place: int) -> float:
        """The factor of the warm-up after ``place`` iterations; it goes from ``warmup_ratio`` to 1."""
        if self.warmup == "constant":
            return self.warmup_ratio
        left = 1 - place / (self.warmup_iters or 1)
        return 1 - left * (1 - self.warmup_ratio) if self.warmup == "linear" else self.warmup_ratio**left


@dataclass(kw_only=True, eq=False)
class LrUpdaterHook(UpdaterHook):
    """Base of learning-rate schedules. Warm-up multiplies the rate by a factor that goes from ``warmup_ratio`` to 1.

    See :class:`UpdaterHook` for the arguments.

    Attributes:
        base_lr: the initial rate of each group.
        regular_lr: the rate of each group without warm-up, of the last time that it was computed; at first an empty list.
    """

    number: ClassVar[str] = "lr"
    base_lr: Values = field(default_factory=list[float], init=False)
    regular_lr: Values = field(default_factory=list[float], init=False)

    def get_lr(self, runner: RunState, base_lr: float) -> float:
        """The current rate of a group whose initial rate is ``base_lr``."""
        return self.at(base_lr, self._place(runner), runner)

    def get_regular_lr(self, runner: RunState) -> Values:
        """The rate of each group without warm-up."""
        return _each(self.base_lr, lambda base: self.get_lr(runner, base))

    def get_warmup_lr(self, cur_iters: int) -> Values:
        """The rate of each group during warm-up, after ``cur_iters`` iterations."""
        factor = self._warmup_factor(cur_iters)
        return _each(self.regular_lr, lambda rate: rate * factor)

    def _set_lr(self, runner: RunState, lr_groups: Values) -> None:
        self._write_each(runner, lr_groups)

    def _begin(self, group: dict[str, Any]) -> float:
        return float(group.setdefault("initial_lr", float(group["lr"])))

    def _write(self, group: dict[str, Any], value: float) -> None:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)  # in place, because an optimizer in a CUDA graph reads this tensor
        else:
            group["lr"] = value


@dataclass(kw_only=True, eq=False)
class MomentumUpdaterHook(UpdaterHook):
    """Base of momentum schedules: of a group's ``momentum``, or the first of its ``betas``.

    Warm-up divides the momentum by a factor that goes from ``warmup_ratio`` to 1. See :class:`UpdaterHook` for the arguments.

    Attributes:
        base_momentum: the initial momentum of each group.
        regular_momentum: as ``regular_lr`` of :class:`LrUpdaterHook`.
    """

    number: ClassVar[str] = "momentum"
    base_momentum: Values = field(default_factory=list[float], init=False)
    regular_momentum: Values = field(default_factory=list[float], init=False)

    warmup_ratio: float = 0.9

    def get_momentum(self, runner: RunState, base_momentum: float) -> float:
        """The current momentum of a group whose initial momentum is ``base_momentum``."""
        return self.at(base_momentum, self._place(runner), runner)

    def get_regular_momentum(self, runner: RunState) -> Values:
        """The momentum of each group without warm-up."""
        return _each(self.base_momentum, lambda base: self.get_momentum(runner, base))

    def get_warmup_momentum(self, cur_iters: int) -> Values:
        """The momentum of each group during warm-up, after ``cur_iters`` iterations."""
        factor = self._warmup_factor(cur_iters)
        return _each(self.regular_momentum, lambda momentum: momentum / factor)

    def _set_momentum(self, runner: RunState, momentum_groups: Values) -> None:
        self._write_each(runner, momentum_groups)

    def _begin(self, group: dict[str, Any]) -> float:
        if "momentum" not in group and "betas" not in group:
            raise ConfigError(
                "the optimizer has neither 'momentum' nor 'betas' for a momentum schedule; write momentum_config=None"
            )
        return group.setdefault("initial_momentum", momentum_of(group))

    def _write(self, group: dict[str, Any], value: float) -> None:
        if "momentum" in group:
            group["momentum"] = value
        else:
            group["betas"] = (value, *group["betas"][1:])


def _each(values: Values, function: Callable[[float], float]) -> Values:
    if isinstance(values, Mapping):
        return {name: [function(value) for value in several] for name, several in values.items()}
    return [function(value) for value in values]


def of_group(name: str, values: Any, optimizer: str, index: int) -> float:
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
