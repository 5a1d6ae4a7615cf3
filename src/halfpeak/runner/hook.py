"""Hook: what is called at each stage of a run. Answers to mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner

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
"""Which general method a stage calls by default."""


class Hook:
    """Base of all hooks: override the stages that matter.

    ::

        before_run
          before_train_epoch
            before_train_iter   [around_train_step: model.train_step]   after_train_iter
          after_train_epoch
          before_val_epoch
            before_val_iter     [model.val_step]                        after_val_iter
          after_val_epoch
        after_run

    The stages of training and of validation call ``before_epoch``, ``before_iter``, ``after_iter`` and ``after_epoch``
    unless they are overridden themselves. A hook that holds state of the training gives it in :meth:`state_dict`.

    Attributes:
        priority: given by the runner when the hook is registered.
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

    def before_run(self, runner: BaseRunner) -> None:
        """Before anything. The model is on its device; state of a checkpoint comes right after this stage."""

    def after_run(self, runner: BaseRunner) -> None:
        """After everything."""

    def before_epoch(self, runner: BaseRunner) -> None:
        """Before each epoch of training or validation."""

    def after_epoch(self, runner: BaseRunner) -> None:
        """After each epoch of training or validation."""

    def before_iter(self, runner: BaseRunner) -> None:
        """Before each iteration of training or validation."""

    def after_iter(self, runner: BaseRunner) -> None:
        """After each iteration of training or validation."""

    def before_train_epoch(self, runner: BaseRunner) -> None:
        """Before each training epoch."""
        self.before_epoch(runner)

    def before_val_epoch(self, runner: BaseRunner) -> None:
        """Before each validation epoch."""
        self.before_epoch(runner)

    def after_train_epoch(self, runner: BaseRunner) -> None:
        """After each training epoch."""
        self.after_epoch(runner)

    def after_val_epoch(self, runner: BaseRunner) -> None:
        """After each validation epoch."""
        self.after_epoch(runner)

    def before_train_iter(self, runner: BaseRunner) -> None:
        """Before the batch goes through the model."""
        self.before_iter(runner)

    def before_val_iter(self, runner: BaseRunner) -> None:
        """Before the batch goes through the model."""
        self.before_iter(runner)

    def after_train_iter(self, runner: BaseRunner) -> None:
        """After ``train_step``; ``runner.outputs`` holds what it returned."""
        self.after_iter(runner)

    def after_val_iter(self, runner: BaseRunner) -> None:
        """After ``val_step``; ``runner.outputs`` holds what it returned."""
        self.after_iter(runner)

    def around_train_step(self, runner: BaseRunner) -> AbstractContextManager[Any] | None:
        """A context that ``model.train_step`` runs in, such as the casts of a precision; None for none."""
        return None

    def around_val_step(self, runner: BaseRunner) -> AbstractContextManager[Any] | None:
        """A context that ``model.val_step`` and the ``test_fn`` of ``EvalHook`` run in; None for none."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this hook, as plain data. That of rank 0 is kept, and every rank's open windows."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave. Called after ``before_run`` of every hook."""

    def every_n_epochs(self, runner: BaseRunner, n: int) -> bool:
        """Whether this epoch is an n-th one; never for n below 1."""
        return (runner.epoch + 1) % n == 0 if n > 0 else False

    def every_n_inner_iters(self, runner: BaseRunner, n: int) -> bool:
        """Whether this iteration is an n-th one of its epoch."""
        return (runner.inner_iter + 1) % n == 0 if n > 0 else False

    def every_n_iters(self, runner: BaseRunner, n: int) -> bool:
        """Whether this iteration is an n-th one of the run."""
        return (runner.iter + 1) % n == 0 if n > 0 else False

    def end_of_epoch(self, runner: BaseRunner) -> bool:
        """Whether this iteration is the last one of its epoch."""
        return runner.inner_iter + 1 == len(runner.data_loader)

    def is_last_epoch(self, runner: BaseRunner) -> bool:
        """Whether this epoch is the last one of the run."""
        return runner.epoch + 1 == runner.max_epochs

    def is_last_iter(self, runner: BaseRunner) -> bool:
        """Whether this iteration is the last one of the run."""
        return runner.iter + 1 == runner.max_iters

    def get_triggered_stages(self) -> list[str]:
        """The stages at which this hook does something, in order.

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
