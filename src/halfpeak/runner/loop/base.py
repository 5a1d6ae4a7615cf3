"""BaseRunner: the methods that both training loops share. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from halfpeak.checkpoint import save
from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_dict
from halfpeak.optim.base import BaseOptimWrapper
from halfpeak.optim.unwrap import unwrap
from halfpeak.parts import random_state
from halfpeak.runner import builder, hook_list, model_step, optimizers, run_checkpoint
from halfpeak.runner.builder import HookConfig
from halfpeak.runner.checkpoint import (
    Location,
    ReviseKeys,
    StrPath,
    checkpoint_path,
    link_latest,
    listed,
    load_checkpoint,
    read_checkpoint,
)
from halfpeak.runner.hook import Hook, RunState
from halfpeak.runner.hook_list import Priority
from halfpeak.runner.loop.data import Flow
from halfpeak.runner.optimizers import Optimizers


class BaseRunner(RunState):
    """A run: its state, which hooks use, the hooks and the files. Subclasses implement the loop.

    The runner calls ``model.train_step``; hooks do everything else, including backward and the optimizer step.

    Args:
        model: has ``train_step(data, optimizer, **kwargs)`` and, for validation, ``val_step``. Both return a dict with
            ``loss`` and, for the log, ``log_vars`` and ``num_samples``.
        batch_processor: deprecated: a function that the runner calls in place of ``train_step`` and ``val_step``.
        optimizer: an optimizer, an :class:`~halfpeak.optim.OptimWrapper`, a dict of optimizers, or None.
        work_dir: directory of checkpoints and logs; created if missing.
        logger: None means ``logging.getLogger("halfpeak.runner")``.
        meta: plain data about the run, saved with every checkpoint.
        max_iters: length of the run in iterations.
        max_epochs: length of the run in epochs, instead of ``max_iters``.

    Raises:
        ConfigTypeError: an argument has the wrong type, a length is no positive integer, or ``train_step`` is missing.
        ConfigError: both lengths are given, or a ``batch_processor`` beside ``train_step``.
    """

    _kind: ClassVar[str]
    """The unit in which a subclass counts the run: ``"epoch"`` or ``"iter"``."""

    def __init__(
        self,
        model: nn.Module,
        batch_processor: model_step.BatchProcessor | None = None,
        optimizer: Optimizers = None,
        work_dir: StrPath | None = None,
        logger: logging.Logger | None = None,
        meta: Mapping[str, Any] | None = None,
        max_iters: int | None = None,
        max_epochs: int | None = None,
    ) -> None:
        model_step.check_model(model, batch_processor)
        optimizer = optimizers.check(optimizer)
        _check_types(logger, meta, work_dir)
        _check_lengths(max_iters=max_iters, max_epochs=max_epochs)
        directory = None if work_dir is None else str(Path(work_dir).absolute())
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
        logger = logger or logging.getLogger("halfpeak.runner")
        super().__init__(model, optimizer, directory, logger, dict(meta or {}), max_iters, max_epochs)
        self.batch_processor = batch_processor
        self._resumed: run_checkpoint.SavedRun | None = None

    @abstractmethod
    def train(self, data_loader: Any, **kwargs: Any) -> None:
        """Train for one turn of the workflow: an epoch or an iteration."""

    @abstractmethod
    def val(self, data_loader: Any, **kwargs: Any) -> None:
        """Validate for one turn of the workflow: a pass over the data or an iteration."""

    @abstractmethod
    def run(self, data_loaders: Sequence[Any], workflow: Sequence[tuple[str, int]], **kwargs: Any) -> None:
        """Run the workflow until the run's length is reached."""

    def run_iter(self, data_batch: Any, train_mode: bool, **kwargs: Any) -> None:
        """Call the model with one batch, keep its outputs in :attr:`outputs` and log them."""
        with self.training_step() if train_mode else self.validation_step():
            outputs, source = self._call_model(data_batch, train_mode, kwargs)
        outputs = model_step.require_outputs(outputs, source)
        if "log_vars" in outputs:
            self.log_buffer.update(outputs["log_vars"], outputs.get("num_samples", 1))
        self.outputs = outputs

    def call_hook(self, fn_name: str) -> None:
        """Call one stage of every hook.

        Raises:
            ConfigError: a hook has no stage of that name.
        """
        hook_list.check_stage(self._hooks, fn_name)
        if self._stage is None and fn_name not in ("after_train_iter", "after_val_iter"):
            self._run_deferred()
        if fn_name == "before_train_iter":
            self.step_result = None
        before, self._stage = self._stage, fn_name
        try:
            hook_list.call(self._hooks, fn_name, self)
            if fn_name == "after_train_iter":
                self._progress.record(self._iter, self.step_result)
            elif fn_name == "before_run":
                self._restore()
        except BaseException:
            if before is None:
                self._deferred.clear()  # the iteration or epoch that the actions wait for does not end
            raise
        finally:
            self._stage = before

    def register_hook(self, hook: Hook, priority: int | str | Priority = "NORMAL") -> None:
        """Add a hook. Hooks of equal priority are called in the order of their registration.

        Raises:
            ConfigTypeError: not a hook, or not a priority.
            ConfigError: the hook is registered already, or the priority does not exist.
        """
        hook_list.register(self._hooks, hook, priority)

    def register_hook_from_cfg(self, hook_cfg: Mapping[str, Any]) -> None:
        """Add the hook that a dict describes by ``type``, arguments and ``priority``."""
        hook, priority = builder.with_priority(hook_cfg)
        self.register_hook(hook, priority=priority)

    def register_lr_hook(self, lr_config: HookConfig) -> None:
        """Add the learning-rate schedule: ``dict(policy='step', step=[8, 11])``, or a hook."""
        self._add(builder.schedule_of("lr_config", lr_config, "LrUpdaterHook"), "VERY_HIGH")

    def register_momentum_hook(self, momentum_config: HookConfig) -> None:
        """Add the momentum schedule: ``dict(policy='cyclic')``, or a hook."""
        self._add(builder.schedule_of("momentum_config", momentum_config, "MomentumUpdaterHook"), "HIGH")

    def register_optimizer_hook(self, optimizer_config: HookConfig) -> None:
        """Add the hook that steps the optimizer: ``dict(grad_clip=...)``, a dict with ``type``, or a hook.

        The default ``type`` is ``OptimWrapperHook`` for an optimizer wrapper and ``OptimizerHook`` for an optimizer.
        """
        default = "OptimWrapperHook" if isinstance(self.optimizer, BaseOptimWrapper) else "OptimizerHook"
        self._add(builder.hook_of("optimizer_config", optimizer_config, default), "ABOVE_NORMAL")

    def register_checkpoint_hook(self, checkpoint_config: HookConfig) -> None:
        """Add the hook that saves checkpoints: ``dict(interval=1)``, or a hook."""
        self._add(builder.hook_of("checkpoint_config", checkpoint_config, "CheckpointHook"), "NORMAL")

    def register_timer_hook(self, timer_config: HookConfig) -> None:
        """Add the hook that measures time: ``dict(type='IterTimerHook')``, or a hook."""
        self._add(builder.hook_of("timer_config", timer_config, "IterTimerHook"), "LOW")

    def register_profiler_hook(self, profiler_config: HookConfig) -> None:
        """Add the hook that profiles: ``dict(profile_iters=2)``, or a hook."""
        self._add(builder.hook_of("profiler_config", profiler_config, "ProfilerHook"), "NORMAL")

    def register_logger_hooks(self, log_config: Mapping[str, Any] | None) -> None:
        """Add loggers: ``dict(interval=50, hooks=[dict(type='TextLoggerHook')])``."""
        for hook in builder.loggers_of(log_config):
            self._add(hook, "VERY_LOW")

    def register_custom_hooks(self, custom_config: list[HookConfig] | HookConfig) -> None:
        """Add hooks, given as objects or as dicts with ``type`` and optionally ``priority``."""
        for one in custom_config if isinstance(custom_config, (list, tuple)) else [custom_config]:
            if isinstance(one, Hook):
                self.register_hook(one)
            elif one is not None:
                self.register_hook_from_cfg(one)

    def register_training_hooks(
        self,
        lr_config: HookConfig,
        optimizer_config: HookConfig = None,
        checkpoint_config: HookConfig = None,
        log_config: Mapping[str, Any] | None = None,
        momentum_config: HookConfig = None,
        timer_config: HookConfig = {"type": "IterTimerHook"},  # noqa: B006 - only read
        custom_hooks_config: list[HookConfig] | HookConfig = None,
    ) -> None:
        """Add the hooks of a usual run. With ``IterBasedRunner``, schedules, checkpoints and loggers count iterations.

        ::

            VERY_HIGH 10     learning rate
            HIGH 30          momentum
            ABOVE_NORMAL 40  optimizer
            NORMAL 50        checkpoints, then custom hooks
            LOW 70           timer
            VERY_LOW 90      loggers

        Raises:
            RegistryError: a hook's ``type`` is not registered. No hook was added.
            ConfigError: a hook refuses an argument. No hook was added.
        """
        if isinstance(log_config, Mapping) and isinstance(log_config.get("hooks"), (list, tuple)):
            log_config = {**log_config, "hooks": [self._in_own_unit(one) for one in log_config["hooks"]]}
        before = list(self._hooks)
        try:
            self.register_lr_hook(self._in_own_unit(lr_config))
            self.register_momentum_hook(self._in_own_unit(momentum_config))
            self.register_optimizer_hook(optimizer_config)
            self.register_checkpoint_hook(self._in_own_unit(checkpoint_config))
            self.register_timer_hook(timer_config)
            self.register_logger_hooks(log_config)
            self.register_custom_hooks(custom_hooks_config)
        except Exception:
            for hook in (hook for hook in self._hooks if hook not in before):
                del hook.priority
            self._hooks[:] = before
            raise

    def get_hook_info(self) -> str:
        """The hooks that act at each stage, in the order of their calls, as text."""
        return hook_list.describe(self._hooks)

    def load_checkpoint(
        self,
        filename: StrPath,
        map_location: Location = "cpu",
        strict: bool = False,
        revise_keys: ReviseKeys = ((r"^module\.", ""),),
    ) -> dict[str, Any]:
        """Load the weights in a checkpoint file into the model, and return everything in the file.

        See :func:`~halfpeak.runner.load_checkpoint`.
        """
        self.logger.info("load checkpoint from %s", filename)
        return load_checkpoint(self.model, filename, map_location, strict, self.logger, revise_keys)

    def resume(
        self, checkpoint: StrPath, resume_optimizer: bool = True, map_location: Location = "default"
    ) -> None:
        """Resume from a checkpoint file. Register the hooks first, and call :meth:`run` afterwards.

        Restores weights, optimizer, ``meta`` and counters; and when the run begins, the states of hooks and, in a run of one
        process, the random generators. The data begins with a new pass. If the number of ranks has changed, the iteration
        counter is rescaled in proportion. A file written by mmcv restores only weights, optimizer, ``meta`` and counters.

        Args:
            checkpoint: path of the file.
            resume_optimizer: whether to restore the optimizer too.
            map_location: as in ``torch.load``; ``"default"`` means the CPU.

        Raises:
            CheckpointError: the file is damaged, missing, or holds something other than plain data.
            StateError: the file does not fit this runner. Nothing was loaded.
        """
        state = read_checkpoint(checkpoint, map_location)
        meta, own = run_checkpoint.parse(state, checkpoint, self._kind, type(self).__name__)
        if resume_optimizer:
            run_checkpoint.check_optimizers(self.optimizer, state.get("optimizer"))
        run_checkpoint.load_model(self.model, state, self.logger, strict=own is not None)
        if resume_optimizer:
            run_checkpoint.load_optimizers(self.optimizer, state.get("optimizer"), self.logger)
        self.meta = {**self.meta, **meta}
        if own is None:
            self._epoch, self._iter = self._counters_of_mmcv(meta)
        else:
            self._epoch, self._iter = meta["epoch"], meta["iter"] * own.world_size // self._world_size
        self._resumed = own
        self.logger.info("resumed epoch %d, iter %d", self._epoch, self._iter)

    def checkpoint(
        self, save_optimizer: bool = True, meta: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The state of the run as plain data; tensors are not copied. Waits for the device.

        Between two stages the state is complete. In a stage after an iteration or an epoch, that iteration or epoch
        counts as finished, but the later hooks of the stage have not run; :meth:`defer` waits for them.

        Raises:
            ConfigTypeError: ``meta`` is not a dict.
        """
        require_dict("meta", {} if meta is None else meta, "meta=dict(seed=0)")
        if self._stage == "after_train_iter":
            self._progress.record(self._iter, self.step_result)
        model = unwrap(self.model)
        classes = getattr(model, "CLASSES", None)
        state: dict[str, Any] = {
            "meta": {
                **(meta or {}),
                **copy.deepcopy(self.meta),
                "epoch": self._epoch + (self._kind == "epoch" and self._stage == "after_train_epoch"),
                "iter": self._iter + (self._stage == "after_train_iter"),
                "time": time.asctime(),
                **({} if classes is None else {"CLASSES": classes}),
            },
            "state_dict": model.state_dict(),
            "hooks": hook_list.state_dict(self._hooks),
            "loop": {
                "version": run_checkpoint.VERSION,
                "kind": self._kind,
                "world_size": self._world_size,
                "progress": self._progress.state_dict(),
            },
            "random": random_state.capture(parameter.device for parameter in model.parameters()),
        }
        if save_optimizer and self.optimizer is not None:
            states = {name: one.state_dict() for name, one in optimizers.by_name(self.optimizer).items()}
            state["optimizer"] = optimizers.unnamed(states)
        return state

    def write_checkpoint(
        self,
        path: StrPath,
        save_optimizer: bool = True,
        meta: Mapping[str, Any] | None = None,
        create_symlink: bool = False,
    ) -> None:
        """Save the run to a file, atomically and with checksums. Rank 0 writes.

        Args:
            path: its directory must exist.
            save_optimizer: whether to save the optimizer's state.
            meta: data to save beside the runner's ``meta``.
            create_symlink: whether to make a link ``latest.pth`` in the same directory.

        Raises:
            CheckpointError: some value is not plain data (the message names it), or the file cannot be written.
        """
        if self._rank == 0:
            save(Path(path), self.checkpoint(save_optimizer, meta), keep_previous=False)
            if create_symlink:
                link_latest(Path(path))

    @abstractmethod
    def _counters_of_mmcv(self, meta: Mapping[str, Any]) -> tuple[int, int]:
        """Finished epochs and iterations, from the ``meta`` of a file written by mmcv."""

    def _in_own_unit(self, config: Any) -> Any:
        """The configuration, with ``by_epoch=False`` as a default in a run counted by iterations."""
        return config

    def _add(self, hook: Hook | None, priority: str) -> None:
        if hook is not None:
            self.register_hook(hook, priority=priority)

    def _call_model(self, batch: Any, train_mode: bool, kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        if self.batch_processor is not None:
            return self.batch_processor(
                self.model, batch, train_mode=train_mode, **kwargs
            ), "batch_processor()"
        if train_mode:
            return self.model.train_step(batch, self.optimizer, **kwargs), "model.train_step()"
        return model_step.val_step(self.model, batch, self.optimizer, kwargs), "model.val_step()"

    def _train_batch(self, batch: Any, kwargs: Mapping[str, Any]) -> None:
        self.data_batch = batch
        self.call_hook("before_train_iter")
        self.run_iter(batch, train_mode=True, **kwargs)
        self.call_hook("after_train_iter")
        self.data_batch = None
        self._iter += 1
        self._run_deferred()

    def _val_batch(self, batch: Any, kwargs: Mapping[str, Any]) -> None:
        self.data_batch = batch
        self.call_hook("before_val_iter")
        with torch.no_grad():
            self.run_iter(batch, train_mode=False, **kwargs)
        self.call_hook("after_val_iter")
        self.data_batch = None

    def _run_deferred(self) -> None:
        actions, self._deferred = self._deferred, []
        for action in actions:
            action()

    def _begin(self, flows: Sequence[Flow], length: str) -> None:
        self._deferred.clear()  # left from an earlier run that was interrupted
        self.logger.info("Start running, work_dir: %s", self.work_dir or "NONE")
        self.logger.info("hooks, in the order of their calls: %s", ", ".join(hook_list.by_name(self._hooks)))
        self.logger.debug("hooks by stage:\n%s", self.get_hook_info())
        self.logger.info("workflow: %s, max: %s", [(flow.mode, flow.times) for flow in flows], length)
        self.call_hook("before_run")

    def _end(self) -> None:
        self.call_hook("after_run")
        self._run_deferred()

    def _restore(self) -> None:
        """Restore hooks, counters and random generators from the checkpoint that the run was resumed from."""
        own, self._resumed = self._resumed, None
        if own is None:
            return
        unknown = hook_list.load_state_dict(self._hooks, own.hooks)
        if unknown:
            self.logger.warning("this run has no hook for the state of %s in the checkpoint", listed(unknown))
        self._progress.load_state_dict(own.progress)
        if own.world_size == self._world_size == 1:
            random_state.restore(own.random)

    def _is_over(self) -> bool:
        by_epoch = self._kind == "epoch"
        done, length = (self._epoch, self._max_epochs) if by_epoch else (self._iter, self._max_iters)
        return length is not None and done >= length

    def _length_of_run(self, given: int | None) -> int:
        """The length of the run in its own unit; ``given`` is the deprecated argument of ``run``."""
        name, example = ("max_epochs", 12) if self._kind == "epoch" else ("max_iters", 90000)
        remedy = f"write {type(self).__name__}(..., {name}={example})"
        if given is not None:
            warnings.warn(f"{name} of run() is deprecated; {remedy}", DeprecationWarning, stacklevel=3)
            setattr(self, f"_{name}", given)
        length = getattr(self, f"_{name}")
        if length is None:
            raise ConfigError(f"this runner has no length; {remedy}")
        return length

    def _enter(self, mode: str, data_loader: Any) -> None:
        self.model.train(mode == "train")
        self.mode = mode
        self.data_loader = data_loader

    def _save(
        self,
        finished: int,
        out_dir: StrPath,
        filename_tmpl: str,
        save_optimizer: bool,
        meta: Mapping[str, Any] | None,
        create_symlink: bool,
    ) -> None:
        number = max(finished, 1) if self._stage is None else finished + 1
        path = checkpoint_path(out_dir, filename_tmpl, number)
        self.write_checkpoint(path, save_optimizer, meta, create_symlink)

    def _run_workflow(self, flows: Sequence[Flow], kwargs: Mapping[str, Any]) -> None:
        """Repeat the workflow until the run is over and a round of the workflow is complete."""
        while not self._is_over():
            for loader, mode, times in flows:
                if self._kind == "iter":
                    self._inner_iter = 0
                for _ in range(times):
                    if mode == "train" and self._is_over():
                        break
                    getattr(self, mode)(loader, **kwargs)


def _check_types(logger: object, meta: object, work_dir: object) -> None:
    if logger is not None and not isinstance(logger, logging.Logger):
        raise ConfigTypeError(
            f"logger must be a logging.Logger, not {type(logger).__name__}; write logger=logging.getLogger()"
        )
    require_dict("meta", {} if meta is None else meta, "meta=dict(seed=0)")
    if work_dir is not None and not isinstance(work_dir, (str, Path)):
        raise ConfigTypeError(f"work_dir={short_repr(work_dir)} must be the path of a directory, or None")


def _check_lengths(**lengths: int | None) -> None:
    for name, value in lengths.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigTypeError(f"{name}={short_repr(value)} must be an integer of 1 or more")
    if all(value is not None for value in lengths.values()):
        raise ConfigError("Only one of max_epochs and max_iters can be set")
