"""Hook: the methods that a runner calls at each stage of a run. RunnerView: the part of the runner that hooks use.

Compatible with mmcv 1.7.2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any, ClassVar, Final, Protocol

from halfpeak.core.step_result import StepResult
from halfpeak.runner.log_buffer import LogBuffer

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


class RunnerView(Protocol):
    """The part of a runner that hooks use. :class:`~halfpeak.runner.BaseRunner` says what each name means."""

    model: Any
    optimizer: Any
    logger: logging.Logger
    meta: dict[str, Any]
    mode: str | None
    work_dir: str | None
    timestamp: str
    data_loader: Any
    log_buffer: LogBuffer
    outputs: dict[str, Any]
    step_result: StepResult | None

    @property
    def hooks(self) -> Sequence[Hook]: ...

    @property
    def rank(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def iter(self) -> int: ...

    @property
    def inner_iter(self) -> int: ...

    @property
    def max_epochs(self) -> int | None: ...

    @property
    def max_iters(self) -> int | None: ...

    @property
    def scheduled_iter(self) -> int: ...

    def current_lr(self) -> list[float] | dict[str, list[float]]: ...

    def current_momentum(self) -> list[float] | dict[str, list[float]]: ...

    def validation_step(self) -> AbstractContextManager[Any]: ...

    def defer(self, action: Callable[[], None]) -> None: ...

    def write_checkpoint(
        self,
        path: str | PathLike[str],
        save_optimizer: bool = True,
        meta: Mapping[str, Any] | None = None,
        create_symlink: bool = False,
    ) -> None: ...


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

    def before_run(self, runner: RunnerView) -> None:
        """Before all other stages, with the model on its device. A resumed run loads hook states after this stage."""

    def after_run(self, runner: RunnerView) -> None:
        """After all other stages."""

    def before_epoch(self, runner: RunnerView) -> None:
        """Before each epoch of training or validation."""

    def after_epoch(self, runner: RunnerView) -> None:
        """After each epoch of training or validation."""

    def before_iter(self, runner: RunnerView) -> None:
        """Before each iteration of training or validation."""

    def after_iter(self, runner: RunnerView) -> None:
        """After each iteration of training or validation."""

    def before_train_epoch(self, runner: RunnerView) -> None:
        """Before each training epoch."""
        self.before_epoch(runner)

    def before_val_epoch(self, runner: RunnerView) -> None:
        """Before each validation epoch."""
        self.before_epoch(runner)

    def after_train_epoch(self, runner: RunnerView) -> None:
        """After each training epoch."""
        self.after_epoch(runner)

    def after_val_epoch(self, runner: RunnerView) -> None:
        """After each validation epoch."""
        self.after_epoch(runner)

    def before_train_iter(self, runner: RunnerView) -> None:
        """Before ``train_step``."""
        self.before_iter(runner)

    def before_val_iter(self, runner: RunnerView) -> None:
        """Before ``val_step``."""
        self.before_iter(runner)

    def after_train_iter(self, runner: RunnerView) -> None:
        """After ``train_step``; ``runner.outputs`` holds what it returned."""
        self.after_iter(runner)

    def after_val_iter(self, runner: RunnerView) -> None:
        """After ``val_step``; ``runner.outputs`` holds what it returned."""
        self.after_iter(runner)

    def around_train_step(self, runner: RunnerView) -> AbstractContextManager[Any] | None:
        """A context manager around ``model.train_step``, such as autocast, or None."""
        return None

    def around_val_step(self, runner: RunnerView) -> AbstractContextManager[Any] | None:
        """A context manager around ``model.val_step`` and the ``test_fn`` of ``EvalHook``, or None."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, as plain data. A checkpoint has that of rank 0."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; StateError, with nothing loaded, if it does not fit.

        Called after ``before_run`` of every hook.
        """

    def every_n_epochs(self, runner: RunnerView, n: int) -> bool:
        """Whether the number of this epoch, counted from 1, is a multiple of ``n``; False for ``n`` below 1."""
        return (runner.epoch + 1) % n == 0 if n > 0 else False

    def every_n_inner_iters(self, runner: RunnerView, n: int) -> bool:
        """As :meth:`every_n_epochs`, for the iteration within its epoch."""
        return (runner.inner_iter + 1) % n == 0 if n > 0 else False

    def every_n_iters(self, runner: RunnerView, n: int) -> bool:
        """As :meth:`every_n_epochs`, for the iteration within the run."""
        return (runner.iter + 1) % n == 0 if n > 0 else False

    def end_of_epoch(self, runner: RunnerView) -> bool:
        """Whether this iteration is the last one of its epoch."""
        return runner.inner_iter + 1 == len(runner.data_loader)

    def is_last_epoch(self, runner: RunnerView) -> bool:
        """Whether this epoch is the last one of the run."""
        return runner.epoch + 1 == runner.max_epochs

    def is_last_iter(self, runner: RunnerView) -> bool:
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
