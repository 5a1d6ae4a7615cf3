"""LoggerHook: when numbers are averaged and logged. Answers to mmcv 1.7.2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.runner.hook import Hook

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner

EVAL_ITERS: Final = "eval_iter_num"
"""Under this name an evaluation leaves the number of its batches in the log buffer, which is no result."""

Tags: TypeAlias = dict[str, Any]


class LoggerHook(Hook):
    """Averages the log buffer over the last ``interval`` iterations and logs it; a subclass says in :meth:`log` where to.

    Only rank 0 logs.

    Args:
        interval: iterations between two logs.
        ignore_last: leave out the iterations after the last full interval of an epoch.
        reset_flag: drop the averages after logging. The last logger of a run does so in any case.
        by_epoch: count within the epoch, or from the beginning.

    Raises:
        ConfigError: ``interval`` is no positive integer.
    """

    def __init__(
        self, interval: int = 10, ignore_last: bool = True, reset_flag: bool = False, by_epoch: bool = True
    ) -> None:
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ConfigError(f"interval={interval!r} must be an integer of 1 or more; write interval=50")
        for name, flag in (("ignore_last", ignore_last), ("reset_flag", reset_flag), ("by_epoch", by_epoch)):
            if not isinstance(flag, bool):
                raise ConfigTypeError(f"{name}={flag!r} must be True or False")
        self.interval = interval
        self.ignore_last = ignore_last
        self.reset_flag = reset_flag
        self.by_epoch = by_epoch

    @abstractmethod
    def log(self, runner: BaseRunner) -> Any:
        """Log what is in ``runner.log_buffer.output``."""

    def before_run(self, runner: BaseRunner) -> None:
        """See to it that the averages are dropped once every logger has seen them."""
        loggers = [hook for hook in runner.hooks if isinstance(hook, LoggerHook)]
        loggers[-1].reset_flag = True

    def before_epoch(self, runner: BaseRunner) -> None:
        """Begin with an empty buffer."""
        runner.log_buffer.clear()

    def after_train_iter(self, runner: BaseRunner) -> None:
        """Log, if it is time."""
        every_n = self.every_n_inner_iters if self.by_epoch else self.every_n_iters
        if every_n(runner, self.interval) or (
            not self.ignore_last and self.by_epoch and self.end_of_epoch(runner)
        ):
            runner.log_buffer.average(self.interval)
        self._log_if_ready(runner)

    def after_train_epoch(self, runner: BaseRunner) -> None:
        """Log what an evaluation has left."""
        self._log_if_ready(runner)

    def after_val_epoch(self, runner: BaseRunner) -> None:
        """Log the averages of the whole validation."""
        runner.log_buffer.average()
        self._log_if_ready(runner)

    def get_mode(self, runner: BaseRunner) -> str:
        """``"train"`` or ``"val"``: what an evaluation during training leaves has no ``time``, or says whose it is."""
        output = runner.log_buffer.output
        return "train" if runner.mode == "train" and "time" in output and EVAL_ITERS not in output else "val"

    def get_epoch(self, runner: BaseRunner) -> int:
        """The number of the epoch, counted from 1."""
        return runner.epoch + 1 if runner.mode == "train" else max(runner.epoch, 1)

    def get_iter(self, runner: BaseRunner, inner_iter: bool = False) -> int:
        """The number of the iteration, counted from 1: in the run, or with ``by_epoch`` and ``inner_iter`` in the epoch."""
        return runner.inner_iter + 1 if self.by_epoch and inner_iter else runner.iter + 1

    def get_lr_tags(self, runner: BaseRunner) -> Tags:
        """``learning_rate`` of the first group; one tag per optimizer where there are several."""
        return _first("learning_rate", runner.current_lr())

    def get_momentum_tags(self, runner: BaseRunner) -> Tags:
        """``momentum`` of the first group; one tag per optimizer where there are several."""
        return _first("momentum", runner.current_momentum())

    def get_loggable_tags(
        self,
        runner: BaseRunner,
        allow_scalar: bool = True,
        allow_text: bool = False,
        add_mode: bool = True,
        tags_to_skip: tuple[str, ...] = ("time", "data_time"),
    ) -> Tags:
        """Name and value of everything to log: ``train/loss``, ``val/mAP``, ``learning_rate``, ``momentum``."""
        mode = f"{self.get_mode(runner)}/" if add_mode else ""
        tags: Tags = {}
        for name, value in runner.log_buffer.output.items():
            is_wanted = allow_text if isinstance(value, str) else allow_scalar and hasattr(value, "__float__")
            if is_wanted and name not in (*tags_to_skip, EVAL_ITERS):
                tags[mode + name] = value
        if runner.optimizer is not None:
            tags.update(self.get_lr_tags(runner))
            tags.update(self.get_momentum_tags(runner))
        return tags

    def _log_if_ready(self, runner: BaseRunner) -> None:
        if runner.log_buffer.ready:
            if runner.rank == 0:
                self.log(runner)
            if self.reset_flag:
                runner.log_buffer.clear_output()


def _first(name: str, values: list[float] | Mapping[str, list[float]]) -> Tags:
    if isinstance(values, Mapping):
        return {f"{name}/{key}": each[0] for key, each in values.items()}
    return {name: values[0]}
