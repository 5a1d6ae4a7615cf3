"""The logger hooks: lines of text and JSON, and TensorBoard. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import datetime
import json
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from halfpeak.checkpoint.temporary import open_to_append
from halfpeak.core.errors import ConfigError
from halfpeak.core.extras import needs_extra
from halfpeak.core.short_repr import short_repr
from halfpeak.engine.memory_report import peak_memory
from halfpeak.optim.arguments import require_count, require_flag
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.hook import Hook, RunState

EVAL_ITERS: Final = "eval_iter_num"
"""The key in the log buffer for the number of batches of an evaluation; it is not logged."""

Tags: TypeAlias = dict[str, Any]


class LoggerHook(Hook):
    """Averages the log buffer over the last ``interval`` iterations. A subclass writes the averages in :meth:`log`.

    Only rank 0 logs.

    Args:
        interval: iterations between two logs.
        ignore_last: do not log the iterations after the last full interval of an epoch.
        reset_flag: drop the averages after logging. The last logger of a run always does.
        by_epoch: count iterations within the epoch rather than within the run.

    Raises:
        ConfigError: ``interval`` is not a positive integer.
    """

    def __init__(
        self, interval: int = 10, ignore_last: bool = True, reset_flag: bool = False, by_epoch: bool = True
    ) -> None:
        self.interval = require_count("interval", interval, hint="; write interval=50")
        self.ignore_last = require_flag("ignore_last", ignore_last)
        self.reset_flag = require_flag("reset_flag", reset_flag)
        self.by_epoch = require_flag("by_epoch", by_epoch)

    @abstractmethod
    def log(self, runner: RunState) -> Any:
        """Log ``runner.log_buffer.output``."""

    def before_run(self, runner: RunState) -> None:
        """Make the last logger drop the averages after it has logged them."""
        loggers = [hook for hook in runner.hooks if isinstance(hook, LoggerHook)]
        loggers[-1].reset_flag = True

    def before_epoch(self, runner: RunState) -> None:
        runner.log_buffer.clear()

    def after_train_iter(self, runner: RunState) -> None:
        every_n = self.every_n_inner_iters if self.by_epoch else self.every_n_iters
        if every_n(runner, self.interval) or (
            not self.ignore_last and self.by_epoch and self.end_of_epoch(runner)
        ):
            runner.log_buffer.average(self.interval)
        self._log_if_ready(runner)

    def after_train_epoch(self, runner: RunState) -> None:
        self._log_if_ready(runner)

    def after_val_epoch(self, runner: RunState) -> None:
        runner.log_buffer.average()
        self._log_if_ready(runner)

    def get_mode(self, runner: RunState) -> str:
        """``"train"`` or ``"val"``. Scores that ``EvalHook`` logs during training count as ``"val"``."""
        output = runner.log_buffer.output
        return "train" if runner.mode == "train" and "time" in output and EVAL_ITERS not in output else "val"

    def get_epoch(self, runner: RunState) -> int:
        """The number of the epoch, counted from 1."""
        return runner.epoch + 1 if runner.mode == "train" else max(runner.epoch, 1)

    def get_iter(self, runner: RunState, inner_iter: bool = False) -> int:
        """The iteration, counted from 1 in the run, or with ``by_epoch`` and ``inner_iter`` in the epoch."""
        return runner.inner_iter + 1 if self.by_epoch and inner_iter else runner.iter + 1

    def get_lr_tags(self, runner: RunState) -> Tags:
        """``learning_rate`` of the first group; with several optimizers, one tag for each."""
        return _tags("learning_rate", runner.current_lr())

    def get_momentum_tags(self, runner: RunState) -> Tags:
        """``momentum`` of the first group; with several optimizers, one tag for each."""
        return _tags("momentum", runner.current_momentum())

    def get_loggable_tags(
        self,
        runner: RunState,
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

    def _log_if_ready(self, runner: RunState) -> None:
        if runner.log_buffer.ready:
            if runner.rank == 0:
                self.log(runner)
            if self.reset_flag:
                runner.log_buffer.clear_output()


def _first(values: list[float] | Mapping[str, list[float]]) -> float | dict[str, float]:
    """The number of the first group; with several optimizers, a dict with that of each."""
    return {name: each[0] for name, each in values.items()} if isinstance(values, Mapping) else values[0]


def _tags(name: str, values: list[float] | Mapping[str, list[float]]) -> Tags:
    first = _first(values)
    if isinstance(first, dict):
        return {f"{name}/{key}": number for key, number in first.items()}
    return {name: first}


_TIMES = ("time", "data_time")


@HOOKS.register_module()
class TextLoggerHook(LoggerHook):
    """Logs to the runner's logger and to ``<work_dir>/<timestamp>.log.json``, whose first line is ``runner.meta``.

    ::

        Epoch [1][50/400]    lr: 1.000e-02, eta: 0:01:40, time: 0.251, data_time: 0.003, memory: 812, loss: 0.6931
        Epoch(val) [1][40]    loss: 0.5871, acc: 0.7133
        Iter [50/90000]    lr: 1.000e-02, eta: 6:15:44, time: 0.251, data_time: 0.003, loss: 0.6931

    A subclass may override ``_log_info`` and ``_dump_log``, which write the two, as subclasses of mmcv's hook do.

    Args:
        by_epoch: count iterations within the epoch rather than within the run.
        interval: iterations between two lines. For this and the next two arguments see :class:`LoggerHook`.
        interval_exp_name: iterations between two lines with the name of the experiment, ``meta["exp_name"]``.
        out_dir: must be None. mmcv copies the logs there after the run; ``out_suffix``, ``keep_local`` and
            ``file_client_args`` are settings of that copy and have no effect without it, as in mmcv.

    Raises:
        ConfigError: ``out_dir`` is not None.
    """

    def __init__(
        self,
        by_epoch: bool = True,
        interval: int = 10,
        ignore_last: bool = True,
        reset_flag: bool = False,
        interval_exp_name: int = 1000,
        out_dir: None = None,
        out_suffix: object = (".log.json", ".log", ".py"),
        keep_local: bool = True,
        file_client_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(interval, ignore_last, reset_flag, by_epoch)
        if out_dir is not None:
            raise ConfigError(
                f"TextLoggerHook copies no logs to out_dir={short_repr(out_dir)}; it writes to the runner's work_dir: leave "
                "out_dir out, and copy the files after runner.run(...)"
            )
        self.interval_exp_name = interval_exp_name
        self.json_log_path: Path | None = None
        self.start_iter = 0
        self.time_sec_tot = 0.0

    def before_run(self, runner: RunState) -> None:
        super().before_run(runner)
        self.start_iter, self.time_sec_tot = runner.iter, 0.0
        if runner.work_dir is not None:
            self.json_log_path = Path(runner.work_dir) / f"{runner.timestamp}.log.json"
            if runner.rank == 0 and runner.meta:
                self._dump_log(dict(runner.meta), runner)

    def log(self, runner: RunState) -> dict[str, Any]:
        """Write the line of text and the line of JSON; return the content of the latter."""
        output = {name: value for name, value in runner.log_buffer.output.items() if name != EVAL_ITERS}
        log_dict: dict[str, Any] = {
            "mode": self.get_mode(runner),
            "epoch": self.get_epoch(runner),
            "iter": runner.log_buffer.output.get(EVAL_ITERS, self.get_iter(runner, inner_iter=True)),
            "lr": None if runner.optimizer is None else _first(runner.current_lr()),
        }
        memory = self._get_max_memory(runner) if "time" in output else None
        log_dict |= {} if memory is None else {"memory": memory}
        log_dict |= output
        self._log_info(log_dict, runner)
        self._dump_log(log_dict, runner)
        return log_dict

    def _get_max_memory(self, runner: RunState) -> int | None:
        """The most memory that the accelerator has held so far, in MiB; None on a CPU."""
        memory = peak_memory(torch.accelerator.current_accelerator(check_available=True))
        return None if memory is None else memory // 2**20

    def _dump_log(self, log_dict: dict[str, Any], runner: RunState) -> None:
        if self.json_log_path is not None:
            append_json_line(self.json_log_path, log_dict)

    def _log_info(self, log_dict: dict[str, Any], runner: Any) -> None:
        name = runner.meta.get("exp_name")
        is_end = self.by_epoch and self.end_of_epoch(runner)
        if name is not None and (self.every_n_iters(runner, self.interval_exp_name) or is_end):
            runner.logger.info("Exp name: %s", name)
        known = {"mode", "epoch", "iter", "lr", "memory", *_TIMES}
        numbers = ", ".join(f"{key}: {_text(value)}" for key, value in log_dict.items() if key not in known)
        if log_dict["mode"] == "val":
            head = (
                f"Epoch(val) [{log_dict['epoch']}][{log_dict['iter']}]"
                if self.by_epoch
                else f"Iter(val) [{log_dict['iter']}]"
            )
            runner.logger.info("%s\t%s", head, numbers)
            return
        if self.by_epoch:
            head = f"Epoch [{log_dict['epoch']}][{log_dict['iter']}/{len(runner.data_loader)}]"
        else:
            head = f"Iter [{log_dict['iter']}/{runner.max_iters}]"
        runner.logger.info(
            "%s\t%s", head, ", ".join([*self._pace(log_dict, runner), *filter(None, [numbers])])
        )

    def _pace(self, log_dict: Mapping[str, Any], runner: RunState) -> list[str]:
        rates = log_dict["lr"]
        if isinstance(rates, Mapping):
            parts = [" ".join(f"lr_{name}: {rate:.3e}" for name, rate in rates.items())]
        else:
            parts = [] if rates is None else [f"lr: {rates:.3e}"]
        if "time" in log_dict:
            self.time_sec_tot += log_dict["time"] * self.interval
            per_iter = self.time_sec_tot / (runner.iter - self.start_iter + 1)
            left = per_iter * ((runner.max_iters or runner.iter + 1) - runner.iter - 1)
            parts.append(f"eta: {datetime.timedelta(seconds=int(left))}")
            parts += [f"{name}: {log_dict[name]:.3f}" for name in _TIMES if name in log_dict]
        return parts + ([f"memory: {log_dict['memory']}"] if "memory" in log_dict else [])


def _text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


@HOOKS.register_module()
class TensorboardLoggerHook(LoggerHook):
    """Writes ``train/<name>``, ``val/<name>``, ``learning_rate`` and ``momentum`` per iteration.

    Args:
        log_dir: None means ``tf_logs`` in the work directory.
        interval: iterations between two points. For this and the other arguments see :class:`LoggerHook`.
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
        self.writer: Any = None

    def before_run(self, runner: RunState) -> None:
        """Open the writer.

        Raises:
            ConfigError: neither the hook nor the runner has a directory.
            MissingExtraError: tensorboard is not installed.
        """
        super().before_run(runner)
        if runner.rank != 0:
            return
        if self.log_dir is None and runner.work_dir is None:
            raise ConfigError(
                "TensorboardLoggerHook has no place to write; give it log_dir=..., or the runner work_dir=..."
            )
        folder = self.log_dir or str(Path(runner.work_dir or "") / "tf_logs")
        with needs_extra(), warnings.catch_warnings():
            # Its dependencies issue DeprecationWarnings at import, on which a user cannot act.
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(folder, purge_step=runner.iter + 1 if runner.iter else None)

    def log(self, runner: RunState) -> None:
        step = self.get_iter(runner)
        for tag, value in self.get_loggable_tags(runner, allow_text=True).items():
            if isinstance(value, str):
                self.writer.add_text(tag, value, step)
            else:
                self.writer.add_scalar(tag, float(value), step)

    def after_run(self, runner: RunState) -> None:
        if self.writer is not None:
            self.writer.close()


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one line of JSON to a file. Floats are rounded to five places; types unknown to JSON become text.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.json"
    >>> append_json_line(path, {"mode": "train", "loss": 0.1234567})
    >>> path.read_text()
    '{"mode": "train", "loss": 0.12346}\\n'
    """
    with open_to_append(path) as file:
        file.write(json.dumps(_rounded(row), default=_as_plain) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def _as_plain(value: Any) -> Any:
    return _rounded(value.item()) if hasattr(value, "item") else str(value)
