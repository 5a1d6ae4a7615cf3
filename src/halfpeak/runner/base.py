"""BaseRunner: what every loop holds and offers to its hooks. Answers to mmcv 1.7.2."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.outcome import StepResult
from halfpeak.optim.wrapped import unwrap
from halfpeak.runner import hook_list, optimizers, stepping
from halfpeak.runner.checkpoint import StrPath
from halfpeak.runner.dist import get_dist_info
from halfpeak.runner.hook import Hook
from halfpeak.runner.log_buffer import LogBuffer
from halfpeak.runner.optimizers import Optimizers
from halfpeak.runner.persistence import Persistence
from halfpeak.runner.priority import Priority
from halfpeak.runner.progress import Progress
from halfpeak.runner.registration import Registration
from halfpeak.runner.workflow import Flow


class BaseRunner(Registration, Persistence):
    """Holds a run: model, optimizer, hooks, counters. Subclasses are the loops.

    The model takes the steps; the hooks do everything else, the optimizer's update included.

    Args:
        model: has ``train_step(data, optimizer, **kwargs)`` and, to validate, ``val_step``. Both return a dict: ``loss``,
            and if something is to be logged ``log_vars`` and ``num_samples``.
        batch_processor: mmcv's old way to step a model that has no ``train_step``.
        optimizer: an optimizer, an :class:`~halfpeak.optim.OptimWrapper`, a dict of optimizers, or None.
        work_dir: where checkpoints and logs go; made if missing.
        logger: None means ``logging.getLogger("halfpeak.runner")``.
        meta: plain data about the run, saved with every checkpoint.
        max_iters: length of the run in iterations; or
        max_epochs: in epochs.

    Attributes:
        hooks: the registered hooks, in the order of their calls.
        mode: ``"train"`` or ``"val"``.
        outputs: what the last step of the model returned.
        step_result: what this iteration did to the optimizer, from the hook that stepped it; None where nobody told.
        log_buffer: numbers for the log.
        data_loader: the current loader.

    Raises:
        ConfigTypeError: something is not of its type.
        ConfigError: both lengths, or a length that is no positive integer.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_processor: stepping.BatchProcessor | None = None,
        optimizer: Optimizers = None,
        work_dir: StrPath | None = None,
        logger: logging.Logger | None = None,
        meta: Mapping[str, Any] | None = None,
        max_iters: int | None = None,
        max_epochs: int | None = None,
    ) -> None:
        stepping.check_model(model, batch_processor)
        self.optimizer = optimizers.check(optimizer)
        _check_types(logger, meta, work_dir)
        _check_lengths(max_iters=max_iters, max_epochs=max_epochs)
        self.model: Any = model
        self.batch_processor = batch_processor
        self.logger = logger or logging.getLogger("halfpeak.runner")
        self.meta = dict(meta or {})
        self.work_dir = None if work_dir is None else str(Path(work_dir).absolute())
        if self.work_dir is not None:
            Path(self.work_dir).mkdir(parents=True, exist_ok=True)
        self.timestamp = time.strftime("%Y%m%d_%H%M%S", time.localtime())
        self.mode: str | None = None
        self.log_buffer = LogBuffer()
        self.outputs: dict[str, Any] = {}
        self.step_result: StepResult | None = None
        self.data_loader: Any = None
        self.data_batch: Any = None
        self._rank, self._world_size = get_dist_info()
        self._hooks = []
        self._epoch = self._iter = self._inner_iter = 0
        self._max_epochs: int | None = max_epochs
        self._max_iters: int | None = max_iters
        self._progress = Progress()
        self._resumed = None
        self._flows: list[Flow] = []
        self._flow = 0
        self._stage: str | None = None
        self._deferred: list[Callable[[], None]] = []

    @property
    def model_name(self) -> str:
        """The name of the model's class, without a wrapper's."""
        return type(unwrap(self.model)).__name__

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._world_size

    @property
    def hooks(self) -> list[Hook]:
        """The registered hooks, in the order of their calls."""
        return self._hooks

    @property
    def epoch(self) -> int:
        """Finished training epochs."""
        return self._epoch

    @property
    def iter(self) -> int:
        """Finished training iterations; while hooks run, the current one is not counted."""
        return self._iter

    @property
    def inner_iter(self) -> int:
        """The iteration within its epoch."""
        return self._inner_iter

    @property
    def max_epochs(self) -> int | None:
        """Length of the run in epochs, if it has one."""
        return self._max_epochs

    @property
    def max_iters(self) -> int | None:
        """Length of the run in iterations, as soon as it is known."""
        return self._max_iters

    @property
    def steps(self) -> int:
        """Steps in which the optimizer moved. Waits for the device."""
        return self._progress.read_steps()

    @property
    def scheduled_iter(self) -> int:
        """:attr:`iter` without the iterations that a skipped step threw away: what schedules go by. Waits."""
        return self._iter - self._progress.read_lost()

    @abstractmethod
    def train(self, data_loader: Any, **kwargs: Any) -> None:
        """One turn of training."""

    @abstractmethod
    def val(self, data_loader: Any, **kwargs: Any) -> None:
        """One turn of validation."""

    @abstractmethod
    def run(self, data_loaders: Sequence[Any], workflow: Sequence[tuple[str, int]], **kwargs: Any) -> None:
        """The whole run."""

    def run_iter(self, data_batch: Any, train_mode: bool, **kwargs: Any) -> None:
        """Let the model take one batch, log what it returns and keep it in :attr:`outputs`."""
        with self.training_step() if train_mode else self.validation_step():
            outputs, source = self._call_model(data_batch, train_mode, kwargs)
        outputs = stepping.require_outputs(outputs, source)
        if "log_vars" in outputs:
            self.log_buffer.update(outputs["log_vars"], outputs.get("num_samples", 1))
        self.outputs = outputs

    def training_step(self) -> AbstractContextManager[Any]:
        """What ``train_step`` runs in: the casts of the hooks, and no gradient reduction where it would be in vain."""
        return hook_list.nested(hook.around_train_step(self) for hook in self._hooks)

    def validation_step(self) -> AbstractContextManager[Any]:
        """What ``val_step`` runs in; enter it to call the model for an evaluation of your own."""
        return hook_list.nested(hook.around_val_step(self) for hook in self._hooks)

    def call_hook(self, fn_name: str) -> None:
        """Call one stage of every hook.

        Raises:
            ConfigError: a hook has no stage of that name.
        """
        hook_list.check_stage(fn_name, self._hooks)
        if self._stage is None:
            self._run_deferred()
        before, self._stage = self._stage, fn_name
        try:
            for hook in tuple(self._hooks):
                getattr(hook, fn_name)(self)
        finally:
            self._stage = before

    def defer(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the current iteration or epoch is over: every hook was called and the counters moved on.

        A checkpoint that is taken there lacks nothing. Outside of a stage it is called at once.
        """
        if self._stage is None:
            action()
        else:
            self._deferred.append(action)

    def register_hook(self, hook: Hook, priority: int | str | Priority = "NORMAL") -> None:
        """Add a hook; among equals the first that came is called first.

        Raises:
            ConfigTypeError: not a hook, or not a priority.
            ConfigError: it was registered before, or the priority does not exist.
        """
        hook_list.insert(self._hooks, hook, priority)

    def get_hook_info(self) -> str:
        """Which hooks act at which stage, in order."""
        return hook_list.describe(self._hooks)

    def current_lr(self) -> list[float] | dict[str, list[float]]:
        """The learning rate of each group; by name where there are several optimizers.

        Raises:
            OrderError: there is no optimizer.
        """
        named = optimizers.by_name(self.optimizer)
        return optimizers.unnamed({name: optimizers.read_lr(one) for name, one in named.items()})

    def current_momentum(self) -> list[float] | dict[str, list[float]]:
        """The momentum of each group, its first beta, or 0; by name where there are several optimizers.

        Raises:
            OrderError: there is no optimizer.
        """
        named = optimizers.by_name(self.optimizer)
        return optimizers.unnamed({name: optimizers.read_momentum(one) for name, one in named.items()})

    def _call_model(self, batch: Any, train_mode: bool, kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        if self.batch_processor is not None:
            return self.batch_processor(
                self.model, batch, train_mode=train_mode, **kwargs
            ), "batch_processor()"
        if train_mode:
            return self.model.train_step(batch, self.optimizer, **kwargs), "model.train_step()"
        return stepping.val_step(self.model, batch, self.optimizer, kwargs), "model.val_step()"

    def _train_batch(self, batch: Any, kwargs: Mapping[str, Any]) -> None:
        """One training iteration and its hooks."""
        self.step_result = None
        self.data_batch = batch
        self.call_hook("before_train_iter")
        self.run_iter(batch, train_mode=True, **kwargs)
        self.call_hook("after_train_iter")
        self._progress.note(self._iter, self.step_result)
        self.data_batch = None
        self._iter += 1

    def _val_batch(self, batch: Any, kwargs: Mapping[str, Any]) -> None:
        """One validation iteration and its hooks."""
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

    def _begin(self, flows: list[Flow], length: str) -> None:
        self._flows = flows
        self.logger.info("Start running, work_dir: %s", self.work_dir or "NONE")
        self.logger.info("hooks, in the order of their calls: %s", ", ".join(hook_list.named(self._hooks)))
        self.logger.debug("hooks by stage:\n%s", self.get_hook_info())
        self.logger.info("workflow: %s, max: %s", [(flow.mode, flow.times) for flow in flows], length)
        self.call_hook("before_run")
        self._restore()

    def _place(self) -> tuple[int, int, bool]:
        """Where to enter the workflow: its entry, how many turns of it are done, and whether it is the saved one."""
        loop = None if self._resumed is None else self._resumed["loop"]
        if loop is None:
            return 0, 0, False
        if loop["workflow"] == self._workflow():
            return loop["flow"], loop["done"], True
        self.logger.warning("the workflow was %s when the run was saved; it begins anew", loop["workflow"])
        return 0, 0, False

    def _workflow(self) -> list[list[Any]]:
        return [[flow.mode, flow.times] for flow in self._flows]


def _check_types(logger: object, meta: object, work_dir: object) -> None:
    if logger is not None and not isinstance(logger, logging.Logger):
        raise ConfigTypeError(
            f"logger must be a logging.Logger, not {type(logger).__name__}; write logger=logging.getLogger()"
        )
    if meta is not None and not isinstance(meta, Mapping):
        raise ConfigTypeError(
            f"meta must be a dict or None, not {type(meta).__name__}; write meta=dict(seed=0)"
        )
    if work_dir is not None and not isinstance(work_dir, (str, Path)):
        raise ConfigTypeError(f"work_dir={work_dir!r} must be the path of a directory, or None")


def _check_lengths(**lengths: int | None) -> None:
    for name, value in lengths.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigTypeError(f"{name}={value!r} must be an integer of 1 or more")
    if all(value is not None for value in lengths.values()):
        raise ConfigError("Only one of max_epochs and max_iters can be set")
