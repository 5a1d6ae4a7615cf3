"""What schedules of the learning rate and of the momentum share: when they act, on what, and their warm-up."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.runner import optimizers
from halfpeak.runner.hook import Hook
from halfpeak.runner.hooks.curves import require_number

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner

_WARMUPS = ("constant", "linear", "exp")

Values = list[float] | dict[str, list[float]]
"""One number per group; by name where there are several optimizers."""


class UpdaterHook(Hook):
    """Sets one number of every parameter group before each epoch or iteration.

    The number follows from where the run is, not from the number that was set last. Schedules by iteration stand still
    where a step was skipped because of an overflow (``runner.scheduled_iter``).

    Args:
        by_epoch: whether the schedule goes by epochs, or by iterations.
        warmup: how the first iterations approach the schedule: ``"constant"``, ``"linear"``, ``"exp"``, or None.
        warmup_iters: how many these are.
        warmup_ratio: the factor at their start.
        warmup_by_epoch: whether ``warmup_iters`` counts epochs.
    """

    def __init__(
        self,
        by_epoch: bool = True,
        warmup: str | None = None,
        warmup_iters: int = 0,
        warmup_ratio: float = 0.1,
        warmup_by_epoch: bool = False,
    ) -> None:
        for name, flag in (("by_epoch", by_epoch), ("warmup_by_epoch", warmup_by_epoch)):
            if not isinstance(flag, bool):
                raise ConfigTypeError(f"{name}={flag!r} must be True or False")
        if warmup is not None:
            _check_warmup(warmup, warmup_iters, warmup_ratio)
        self.by_epoch = by_epoch
        self.warmup = warmup
        self.warmup_iters = warmup_iters
        self.warmup_ratio = warmup_ratio
        self.warmup_by_epoch = warmup_by_epoch
        self._base: dict[str, list[float]] = {}
        self._epoch: int | None = None
        self._is_warming = warmup is not None

    @abstractmethod
    def _value(self, runner: BaseRunner, group: dict[str, Any], base: float) -> float:
        """What the schedule says for a group that begins with ``base``."""

    @abstractmethod
    def _begin(self, group: dict[str, Any]) -> float:
        """What a group begins with, kept in the group so that a checkpoint knows it."""

    @abstractmethod
    def _write(self, group: dict[str, Any], value: float) -> None:
        """Set the number."""

    @abstractmethod
    def _warm(self, value: float, factor: float) -> float:
        """The number in the warm-up, whose factor goes to 1."""

    def before_run(self, runner: BaseRunner) -> None:
        """Note what the groups begin with.

        Raises:
            OrderError: the runner has no optimizer.
        """
        named = optimizers.by_name(runner.optimizer)
        self._base = {name: [self._begin(group) for group in one.param_groups] for name, one in named.items()}
        self._epoch = None
        self._is_warming = self.warmup is not None

    def before_train_epoch(self, runner: BaseRunner) -> None:
        """Set the number of the epoch."""
        if self.by_epoch:
            self._set(runner)

    def before_train_iter(self, runner: BaseRunner) -> None:
        """Set the number of the iteration, where there is one."""
        if not self.by_epoch or self._is_warming or self._epoch != runner.epoch:
            self._set(runner)

    def _set(self, runner: BaseRunner) -> None:
        self._epoch = runner.epoch
        factor = self._factor(runner)
        self._is_warming = factor is not None
        for name, one in optimizers.by_name(runner.optimizer).items():
            for group, base in zip(one.param_groups, self._base[name], strict=False):
                value = self._value(runner, group, base)
                self._write(group, value if factor is None else self._warm(value, factor))

    def _place(self, runner: BaseRunner) -> int:
        """How far the schedule is, in epochs or iterations."""
        return runner.epoch if self.by_epoch else runner.scheduled_iter

    def _total(self, runner: BaseRunner) -> int:
        """How far it goes.

        Raises:
            ConfigError: the runner has no such length.
        """
        total = runner.max_epochs if self.by_epoch else runner.max_iters
        if total is None:
            raise ConfigError(
                f"{type(self).__name__} counts epochs, and this runner has max_iters; write by_epoch=False"
            )
        return total

    def _warmup_length(self, runner: BaseRunner) -> int:
        per_unit = len(runner.data_loader) if self.warmup_by_epoch and runner.data_loader is not None else 1
        return self.warmup_iters * per_unit

    def _factor(self, runner: BaseRunner) -> float | None:
        """The factor of the warm-up; None after it."""
        if self.warmup is None or not self._is_warming:
            return None
        length, place = self._warmup_length(runner), runner.scheduled_iter
        if place >= length:
            return None
        left = 1 - place / length
        if self.warmup == "constant":
            return self.warmup_ratio
        return 1 - left * (1 - self.warmup_ratio) if self.warmup == "linear" else self.warmup_ratio**left

    def _by_group(self, runner: BaseRunner, number: Callable[[float], float]) -> Values:
        """A number per group, in the form of ``runner.current_lr``."""
        return optimizers.unnamed(
            {name: [number(base) for base in bases] for name, bases in self._base.items()}
        )


def require_iterations(by_epoch: bool, policy: str) -> None:
    """Check that a policy which has no meaning by epochs is not asked to go by them.

    Raises:
        ConfigError: it is.
    """
    if by_epoch:
        raise ConfigError(f"policy {policy!r} goes by iterations only; write by_epoch=False")


def of_group(name: str, values: Any, optimizer: str, index: int) -> float:
    """One group's number out of a number for all, a list with one per group, or a dict of these by optimizer.

    Raises:
        ConfigError: there is none for it.
    """
    found: Any = values
    if isinstance(found, Mapping):
        found = found.get(optimizer)
    if isinstance(found, (list, tuple)):
        found = found[index] if index < len(found) else None
    if found is None:
        where = f" of optimizer {optimizer!r}" if optimizer else ""
        raise ConfigError(f"{name}={values!r} has no number for group {index}{where}; give one per group")
    return require_number(name, found)


def _check_warmup(warmup: object, iters: object, ratio: object) -> None:
    if warmup not in _WARMUPS:
        raise ConfigError(f"warmup={warmup!r} must be None or one of {', '.join(map(repr, _WARMUPS))}")
    if isinstance(iters, bool) or not isinstance(iters, int) or iters < 1:
        raise ConfigError(f"warmup_iters={iters!r} must be an integer of 1 or more; write warmup_iters=500")
    if not 0 < require_number("warmup_ratio", ratio) <= 1:
        raise ConfigError(f"warmup_ratio={ratio!r} must be above 0 and at most 1; write warmup_ratio=0.1")
