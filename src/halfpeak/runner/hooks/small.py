"""Small hooks: closures, caches, times, seeds and buffers. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from halfpeak.core.errors import ConfigTypeError
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_flag
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.distributed import allreduce_params
from halfpeak.runner.hook import GENERIC, Hook, RunState
from halfpeak.runner.hook_list import unknown_stage
from halfpeak.runner.loop.data import set_epoch


@HOOKS.register_module()
class ClosureHook(Hook):
    """Calls ``fn(runner)`` at the stage ``fn_name``.

    Raises:
        ConfigError: there is no such stage.
        ConfigTypeError: ``fn`` cannot be called.

    >>> ClosureHook("after_run", print).get_triggered_stages()
    ['after_run']
    """

    def __init__(self, fn_name: str, fn: Callable[[RunState], Any]) -> None:
        if not callable(fn):
            raise ConfigTypeError(f"fn={short_repr(fn)} must be a function of the runner")
        if fn_name not in (*Hook.stages, *GENERIC.values()):
            raise unknown_stage(fn_name)
        self.fn_name, self.fn = fn_name, fn
        setattr(self, fn_name, fn)

    def get_triggered_stages(self) -> list[str]:
        return [stage for stage in Hook.stages if self.fn_name in (stage, GENERIC.get(stage))]


@HOOKS.register_module()
class EmptyCacheHook(Hook):
    """Empties the cache of the accelerator's allocator at the chosen stages.

    Raises:
        ConfigTypeError: an argument is neither True nor False.
    """

    def __init__(
        self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False
    ) -> None:
        moments = {"before_epoch": before_epoch, "after_epoch": after_epoch, "after_iter": after_iter}
        self._moments = frozenset(name for name, flag in moments.items() if require_flag(name, flag))

    def before_epoch(self, runner: RunState) -> None:
        self._empty("before_epoch")

    def after_epoch(self, runner: RunState) -> None:
        self._empty("after_epoch")

    def after_iter(self, runner: RunState) -> None:
        self._empty("after_iter")

    def _empty(self, moment: str) -> None:
        if moment in self._moments and torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Logs ``time``, from the end of one iteration to the end of the next, and ``data_time``, to the next's start."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def before_epoch(self, runner: RunState) -> None:
        self._last = time.perf_counter()

    def before_iter(self, runner: RunState) -> None:
        runner.log_buffer.update({"data_time": time.perf_counter() - self._last})

    def after_iter(self, runner: RunState) -> None:
        now = time.perf_counter()
        runner.log_buffer.update({"time": now - self._last})
        self._last = now


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """Calls ``set_epoch`` of the current loader's sampler, or its batch sampler's, before each epoch."""

    def before_epoch(self, runner: RunState) -> None:
        set_epoch(runner.data_loader, runner.epoch)


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Replaces the model's buffers by their mean over the ranks after each epoch.

    Args:
        distributed: False disables the hook.

    Raises:
        ConfigTypeError: ``distributed`` is neither True nor False.
    """

    def __init__(self, distributed: bool = True) -> None:
        self.distributed = require_flag("distributed", distributed)

    def after_epoch(self, runner: RunState) -> None:
        if self.distributed:
            allreduce_params(runner.model.buffers())
