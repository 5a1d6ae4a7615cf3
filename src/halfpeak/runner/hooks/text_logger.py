"""TextLoggerHook: a line to read and a line of JSON per log. Answers to mmcv 1.7.2."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfpeak.runner.hooks import json_lines
from halfpeak.runner.hooks.logger import EVAL_ITERS, LoggerHook

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner

_TIMES = ("time", "data_time")


class TextLoggerHook(LoggerHook):
    """Writes to the runner's logger, and to ``<work_dir>/<timestamp>.log.json``, whose first line is ``runner.meta``.

    ::

        Epoch [1][50/400]    lr: 1.000e-02, eta: 0:01:40, time: 0.251, data_time: 0.003, memory: 812, loss: 0.6931
        Epoch(val) [1][40]    loss: 0.5871, acc: 0.7133
        Iter [50/90000]    lr: 1.000e-02, eta: 6:15:44, time: 0.251, data_time: 0.003, loss: 0.6931

    Args:
        by_epoch: count iterations within the epoch; otherwise from the beginning.
        interval: iterations between two lines; see :class:`LoggerHook` for it and the next two.
        interval_exp_name: iterations between two lines that say the name of the experiment, ``meta["exp_name"]``.
    """

    def __init__(
        self,
        by_epoch: bool = True,
        interval: int = 10,
        ignore_last: bool = True,
        reset_flag: bool = False,
        interval_exp_name: int = 1000,
    ) -> None:
        super().__init__(interval, ignore_last, reset_flag, by_epoch)
        self.interval_exp_name = interval_exp_name
        self.json_log_path: Path | None = None
        self._start = 0
        self._seconds = 0.0

    def before_run(self, runner: BaseRunner) -> None:
        """Begin the file."""
        super().before_run(runner)
        self._start, self._seconds = runner.iter, 0.0
        if runner.work_dir is not None:
            self.json_log_path = Path(runner.work_dir) / f"{runner.timestamp}.log.json"
            if runner.rank == 0 and runner.meta:
                json_lines.append(self.json_log_path, runner.meta)

    def log(self, runner: BaseRunner) -> dict[str, Any]:
        """Write both lines; returns what the second one holds."""
        output = {name: value for name, value in runner.log_buffer.output.items() if name != EVAL_ITERS}
        row: dict[str, Any] = {
            "mode": self.get_mode(runner),
            "epoch": self.get_epoch(runner),
            "iter": runner.log_buffer.output.get(EVAL_ITERS, self.get_iter(runner, inner_iter=True)),
            "lr": _first_rates(runner),
        }
        if "time" in output:
            memory = _peak_memory()
            row |= {} if memory is None else {"memory": memory}
        row |= output
        self._write_text(row, runner)
        if self.json_log_path is not None:
            json_lines.append(self.json_log_path, row)
        return row

    def _write_text(self, row: Mapping[str, Any], runner: Any) -> None:
        name = runner.meta.get("exp_name")
        is_end = self.by_epoch and self.end_of_epoch(runner)
        if name is not None and (self.every_n_iters(runner, self.interval_exp_name) or is_end):
            runner.logger.info("Exp name: %s", name)
        known = {"mode", "epoch", "iter", "lr", "memory", *_TIMES}
        numbers = ", ".join(f"{key}: {_text(value)}" for key, value in row.items() if key not in known)
        if row["mode"] == "val":
            head = (
                f"Epoch(val) [{row['epoch']}][{row['iter']}]"
                if self.by_epoch
                else f"Iter(val) [{row['iter']}]"
            )
            runner.logger.info("%s\t%s", head, numbers)
            return
        if self.by_epoch:
            head = f"Epoch [{row['epoch']}][{row['iter']}/{len(runner.data_loader)}]"
        else:
            head = f"Iter [{row['iter']}/{runner.max_iters}]"
        runner.logger.info("%s\t%s", head, ", ".join([*self._pace(row, runner), *filter(None, [numbers])]))

    def _pace(self, row: Mapping[str, Any], runner: BaseRunner) -> list[str]:
        rates = row["lr"]
        if isinstance(rates, Mapping):
            parts = [" ".join(f"lr_{name}: {rate:.3e}" for name, rate in rates.items())]
        else:
            parts = [] if rates is None else [f"lr: {rates:.3e}"]
        if "time" in row:
            self._seconds += row["time"] * self.interval
            per_iter = self._seconds / (runner.iter - self._start + 1)
            left = per_iter * ((runner.max_iters or runner.iter + 1) - runner.iter - 1)
            parts.append(f"eta: {datetime.timedelta(seconds=int(left))}")
            parts += [f"{name}: {row[name]:.3f}" for name in _TIMES if name in row]
        return parts + ([f"memory: {row['memory']}"] if "memory" in row else [])


def _first_rates(runner: BaseRunner) -> Any:
    if runner.optimizer is None:
        return None
    rates = runner.current_lr()
    return {name: each[0] for name, each in rates.items()} if isinstance(rates, dict) else rates[0]


def _text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _peak_memory() -> int | None:
    """The most MiB that tensors have held on the accelerator; None where nobody counts."""
    if not torch.accelerator.is_available():
        return None
    try:
        return int(torch.accelerator.memory.max_memory_allocated() / 2**20)
    except (RuntimeError, NotImplementedError):  # a backend whose allocator keeps no statistics
        return None
