"""TensorboardLoggerHook: the log as TensorBoard events. Answers to mmcv 1.7.2."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfpeak.core.errors import ConfigError
from halfpeak.runner.hooks.logger import LoggerHook

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner


class TensorboardLoggerHook(LoggerHook):
    """Writes ``train/<name>``, ``val/<name>``, ``learning_rate`` and ``momentum`` per iteration.

    Args:
        log_dir: None means ``tf_logs`` in the work directory.
        interval: iterations between two points; see :class:`LoggerHook` for it and the rest.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        interval: int = 10,
        ignore_last: bool = True,
        reset_flag: bool = False,
        by_epoch: bool = True,
    ) -> None:
        super().__init__(interval, ignore_last, reset_flag, by_epoch)
        self.log_dir = log_dir
        self._writer: Any = None

    def before_run(self, runner: BaseRunner) -> None:
        """Open the writer.

        Raises:
            ConfigError: tensorboard is not installed, or there is no directory.
        """
        super().before_run(runner)
        if runner.rank != 0:
            return
        if self.log_dir is None and runner.work_dir is None:
            raise ConfigError(
                "TensorboardLoggerHook has no place to write; give it log_dir=..., or the runner work_dir=..."
            )
        folder = self.log_dir or str(Path(runner.work_dir or "") / "tf_logs")
        try:
            with warnings.catch_warnings():
                # Its dependencies deprecate each other at import; nobody who trains can act on that.
                warnings.simplefilter("ignore")
                from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise ConfigError(
                "tensorboard is not installed; write pip install 'halfpeak[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(folder, purge_step=runner.iter + 1 if runner.iter else None)

    def log(self, runner: BaseRunner) -> None:
        """Write one point per number."""
        step = self.get_iter(runner)
        for tag, value in self.get_loggable_tags(runner, allow_text=True).items():
            if isinstance(value, str):
                self._writer.add_text(tag, value, step)
            else:
                self._writer.add_scalar(tag, float(value), step)

    def after_run(self, runner: BaseRunner) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._writer.close()
