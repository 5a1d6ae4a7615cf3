"""Hook: the methods that a runner calls at each stage of a run. RunState: what hooks use of a run.

Compatible with mmcv 1.7.2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar, Final

from torch import nn

from halfpeak.core.step_result import StepResult
from halfpeak.optim.base import momentum_of
from halfpeak.optim.unwrap import unwrap
from halfpeak.runner import optimizers
from halfpeak.runner.distributed import get_dist_info
from halfpeak.runner.log_buffer import LogBuffer
from halfpeak.runner.optimizers import Optimizers
from halfpeak.runner.step_counter import StepCounter
from halfpeak.runner.utilities import get_time_str

GENERIC: Final = {
    "before_train_epoch": "before_epoch",
    "before_val_epoch": "before_epoch",
    "after_train_epoch": "after_epoch",
    "after_val_epoch": "after_epoch",
    "before_train_iter": "before_iter",
    "before_val_iter": "before_iter",
    "after_train_iter": "after_iter",
    "after_val_iter": "after_iter",
}
"""Stage -> the general method that it calls by default."""


class RunState:
    """What hooks use of a run. :class:`~halfpeak.runner.BaseRunner` adds the loop and the files.

    Attributes:
        mode: ``"train"`` or ``"val"``.
        outputs: the dict that the last call of the model returned.
        step_result: the result of this iteration, set by the hook that steps; None counts as a step.
    """

    data_batch: Any = None
    """The batch of the current iteration. Of the class too, because a ``train`` written for mmcv deletes it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        work_dir: str | None,
        logger: logging.Logger,
        meta: dict[str, Any],
        max_iters: int | None,
        max_epochs: int | None,
    ) -> None:
        self.model: Any = model
        self.optimizer: Any = optimizer
        self.work_dir, self.logger, self.meta = work_dir, logger, meta
        self.timestamp = get_time_str()
        self.mode: str | None = None
        self.log_buffer = LogBuffer()
        self.outputs: dict[str, Any] = {}
        self.step_result: StepResult | None = None
        self.data_loader: Any = None
        self._rank, self._world_size = get_dist_info()
        self._hooks: list[Hook] = []
        self._epoch = self._iter = self._inner_iter = 0
        self._max_epochs: int | None = max_epochs
        self._max_iters: int | None = max_iters
        self._progress = StepCounter()
        self._stage: str | None = None
        self._deferred: list[Callable[[], None]] = []

    @property
    def model_name(self) -> str:
        """The class name of the model inside any wrapper."""
        return type(unwrap(self.model)).__name__

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
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
        """Finished training iterations. While hooks run, the current iteration is not counted."""
        return self._iter

    @property
    def inner_iter(self) -> int:
        """The index of the iteration within its epoch."""
        return self._inner_iter

    @property
    def max_epochs(self) -> int | None:
        """Length of the run in epochs, or None."""
        return self._max_epochs

    @property
    def max_iters(self) -> int | None:
        """Length of the run in iterations; None until it is known."""
        return self._max_iters

    @property
    def steps(self) -> int:
        """The number of steps that changed the parameters. Waits for the device."""
        return self._progress.read_steps()

    @property
    def scheduled_iter(self) -> int:
        """:attr:`iter` minus the iterations that skipped steps dropped; schedules use it. Waits for the device."""
        return self._iter - self._progress.read_lost()

    def current_lr(self) -> list[float] | dict[str, list[float]]:
        """The learning rate of each parameter group; a dict by name if there are several optimizers.

        Raises:
            OrderError: there is no optimizer.
        """
        return optimizers.of_each_group(self.optimizer, lambda group: float(group["lr"]))

    def current_momentum(self) -> list[float] | dict[str, list[float]]:
        """The momentum, first beta, or 0 of each parameter group; a dict by name if there are several optimizers.

        Raises:
            OrderError: there is no optimizer.
        """
        return optimizers.of_each_group(self.optimizer, momentum_of)

    def training_step(self) -> AbstractContextManager[Any]:
        """The context of ``train_step``: the casts of hooks, and no gradient reduction inside a window."""
        return nested(hook.around_train_step(self) for hook in self._hooks)

    def validation_step(self) -> AbstractContextManager[Any]:
        """The context of ``val_step``: the casts of hooks. User code enters it to evaluate the model by itself."""
        return nested(hook.around_val_step(self) for hook in self._hooks)

    def defer(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the current stage is over: all hooks have run, and the counters have moved on.

        A checkpoint taken then is complete. Outside any stage, ``action`` is called at once. If a hook or the model raises
        first, it is never called.
        """
        if self._stage is None:
            action()
        else:
            self._deferred.append(action)


class Hook:
    """Base of all hooks. A subclass overrides the stages that it needs.

    ::

        before_run
          before_train_epoch
            before_train_iter   [around_train_step: model.train_step]   after_train_iter
          after_train_epoch
          before_val_epoch
            before_val_iter     [around_val_step: model.val_step]       after_val_iter
          after_val_epoch
        after_run

    By default the stages of training and validation call ``before_epoch``, ``before_iter``, ``after_iter`` and
    ``after_epoch``. A hook returns the state that a resumed run needs from :meth:`state_dict`.

    Attributes:
        priority: set by the runner when the hook is registered.
    """

    stages: ClassVar[tuple[str, ...]] = (
        "before_run",
        "before_train_epoch",
        "before_train_iter",
        "after_train_iter",
        "after_train_epoch",
        "before_val_epoch",
        "before_val_iter",
        "after_val_iter",
        "after_val_epoch",
        "after_run",
    )

    priority: int

    def before_run(self, runner: RunState) -> None:
        """Before all other stages, with the model on its device. A resumed run loads hook states after this stage."""

    def after_run(self, runner: RunState) -> None:
        """After all other stages."""

    def before_epoch(self, runner: RunState) -> None:
        """Before each epoch of training or validation."""

    def after_epoch(self, runner: RunState) -> None:
        """After each epoch of training or validation."""

    def before_iter(self, runner: RunState) -> None:
        """Before each iteration of training or validation."""

    def after_iter(self, runner: RunState) -> None:
        """After each iteration of training or validation."""

    def before_train_epoch(self, runner: RunState) -> None:
        """Before each training epoch."""
        self.before_epoch(runner)

    def before_val_epoch(self, runner: RunState) -> None:
        """Before each validation epoch."""
        self.before_epoch(runner)

    def after_train_epoch(self, runner: RunState) -> None:
        """After each training epoch."""
        self.after_epoch(runner)

    def after_val_epoch(self, runner: RunState) -> None:
        """After each validation epoch."""
        self.after_epoch(runner)

    def before_train_iter(self, runner: RunState) -> None:
        """Before ``train_step``."""
        self.before_iter(runner)

    def before_val_iter(self, runner: RunState) -> None:
        """Before ``val_step``."""
        self.before_iter(runner)

    def after_train_iter(self, runner: RunState) -> None:
        """After ``train_step``; ``runner.outputs`` holds what it returned."""
        self.after_iter(runner)

    def after_val_iter(self, runner: RunState) -> None:
        """After ``val_step``; ``runner.outputs`` holds what it returned."""
        self.after_iter(runner)

    def around_train_step(self, runner: RunState) -> AbstractContextManager[Any] | None:
        """A context manager around ``model.train_step``, such as autocast, or None."""
        return None

    def around_val_step(self, runner: RunState) -> AbstractContextManager[Any] | None:
        """A context manager around ``model.val_step`` and the ``test_fn`` of ``EvalHook``, or None."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, as plain data. A checkpoint has that of rank 0."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; StateError, with nothing loaded, if it does not fit.

        Called after ``before_run`` of every hook.
        """

    def every_n_epochs(self, runner: RunState, n: int) -> bool:
        """Whether the number of this epoch, counted from 1, is a multiple of ``n``; False for ``n`` below 1."""
        return (runner.epoch + 1) % n == 0 if n > 0 else False

    def every_n_inner_iters(self, runner: RunState, n: int) -> bool:
        """As :meth:`every_n_epochs`, for the iteration within its epoch."""
        return (runner.inner_iter + 1) % n == 0 if n > 0 else False

    def every_n_iters(self, runner: RunState, n: int) -> bool:
        """As :meth:`every_n_epochs`, for the iteration within the run."""
        return (runner.iter + 1) % n == 0 if n > 0 else False

    def end_of_epoch(self, runner: RunState) -> bool:
        """Whether this iteration is the last one of its epoch."""
        return runner.inner_iter + 1 == len(runner.data_loader)

    def is_last_epoch(self, runner: RunState) -> bool:
        """Whether this epoch is the last one of the run."""
        return runner.epoch + 1 == runner.max_epochs

    def is_last_iter(self, runner: RunState) -> bool:
        """Whether this iteration is the last one of the run."""
        return runner.iter + 1 == runner.max_iters

    def get_triggered_stages(self) -> list[str]:
        """The stages that this hook overrides, directly or by a general method, in order.

        >>> class Greeter(Hook):
        ...     def before_epoch(self, runner):
        ...         print("hello")
        >>> Greeter().get_triggered_stages()
        ['before_train_epoch', 'before_val_epoch']
        """
        return [
            stage
            for stage in Hook.stages
            if self._overrides(stage) or (stage in GENERIC and self._overrides(GENERIC[stage]))
        ]

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Hook, method)


@contextmanager
def nested(contexts: Iterable[AbstractContextManager[Any] | None]) -> Generator[None]:
    """Enter several context managers in order, skipping None."""
    with ExitStack() as stack:
        for context in contexts:
            if context is not None:
                stack.enter_context(context)
        yield
