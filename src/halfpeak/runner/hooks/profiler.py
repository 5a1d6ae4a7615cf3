"""ProfilerHook: runs ``torch.profiler`` over the first part of a run. Compatible with mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import profiler

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_count
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.hook import Hook, RunState


@HOOKS.register_module()
class ProfilerHook(Hook):
    """Profiles the first ``profile_iters`` epochs, or with ``by_epoch=False`` iterations, of a run.

    Args:
        activities: ``"cpu"`` and ``"cuda"``; activities that the machine does not support are ignored.
        schedule: arguments of ``torch.profiler.schedule``, which counts iterations.
        on_trace_ready: a function of the profiler; ``dict(type="log_trace", row_limit=20)``, which logs a table; or
            ``dict(type="tb_trace", dir_name="traces")``, which writes TensorBoard files.
        json_trace_path: path of a Chrome trace to write at the end.
        options: passed to ``torch.profiler.profile``, such as ``profile_memory=True``.

    Raises:
        ConfigError: an unknown activity or trace, or ``profile_iters`` below 1.
    """

    def __init__(
        self,
        by_epoch: bool = True,
        profile_iters: int = 1,
        activities: Sequence[str] = ("cpu", "cuda"),
        schedule: Mapping[str, int] | None = None,
        on_trace_ready: Callable[[Any], Any] | Mapping[str, Any] | None = None,
        json_trace_path: str | None = None,
        **options: Any,
    ) -> None:
        known = profiler.ProfilerActivity.__members__
        here = {
            name.lower() for name, activity in known.items() if activity in profiler.supported_activities()
        }
        allowed = sorted({*here, "cpu", "cuda"})
        trace = on_trace_ready.get("type") if isinstance(on_trace_ready, Mapping) else "log_trace"
        require_count("profile_iters", profile_iters)
        if not isinstance(activities, (list, tuple)) or not all(one in allowed for one in activities):
            raise ConfigError(
                f"activities={short_repr(activities)} must be a list of {', '.join(map(repr, allowed))}; write "
                "activities=['cpu', 'cuda']"
            )
        if trace not in ("log_trace", "tb_trace"):
            raise ConfigError(
                f"on_trace_ready={short_repr(on_trace_ready)} must have the type 'log_trace' or 'tb_trace'; write "
                "on_trace_ready=dict(type='log_trace')"
            )
        self.by_epoch, self.profile_iters, self.json_trace_path = by_epoch, profile_iters, json_trace_path
        self._options: dict[str, Any] = {
            **options,
            "activities": [known[name.upper()] for name in activities if name in here],
        }
        try:
            self._options["schedule"] = None if schedule is None else profiler.schedule(**schedule)
        except TypeError as error:
            raise ConfigTypeError(f"schedule={short_repr(schedule)}: {error}") from None
        self._trace = on_trace_ready
        self._profiler: profiler.profile | None = None

    def before_run(self, runner: RunState) -> None:
        handler: Any = self._trace
        if isinstance(handler, Mapping):
            options: dict[str, Any] = {name: value for name, value in handler.items() if name != "type"}
            handler = (
                _logs(runner, options)
                if handler["type"] == "log_trace"
                else profiler.tensorboard_trace_handler(**options)
            )
        self._profiler = profiler.profile(on_trace_ready=handler, **self._options)
        self._profiler.start()

    def after_train_iter(self, runner: RunState) -> None:
        if self._profiler is not None:
            self._profiler.step()
            self._stop(not self.by_epoch and runner.iter + 1 >= self.profile_iters)

    def after_train_epoch(self, runner: RunState) -> None:
        self._stop(self.by_epoch and runner.epoch + 1 >= self.profile_iters)

    def after_run(self, runner: RunState) -> None:
        self._stop(True)

    def _stop(self, is_over: bool) -> None:
        if is_over and self._profiler is not None:
            self._profiler.stop()
            if self.json_trace_path is not None:
                self._profiler.export_chrome_trace(self.json_trace_path)
            self._profiler = None


def _logs(runner: RunState, options: Mapping[str, Any]) -> Callable[[profiler.profile], None]:
    return lambda made: runner.logger.info("%s", made.key_averages().table(**options))
