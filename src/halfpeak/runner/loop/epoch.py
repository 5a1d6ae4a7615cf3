"""EpochBasedRunner: the training loop that counts epochs. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from halfpeak.core.errors import ConfigError
from halfpeak.runner.builder import RUNNERS
from halfpeak.runner.checkpoint import StrPath, checkpoint_path
from halfpeak.runner.loop.base import BaseRunner
from halfpeak.runner.loop.batches import Batches, parse_workflow, rescale


@RUNNERS.register_module()
class EpochBasedRunner(BaseRunner):
    """Trains for a number of epochs.

    ::

        before_run
        until max_epochs are finished, for each entry (mode, n) of the workflow, n times:
            before_<mode>_epoch
            for each batch: before_<mode>_iter, the model's step, after_<mode>_iter
            after_<mode>_epoch
        after_run

    Validation changes no counter. See :class:`BaseRunner` for the arguments.

    Example:
        >>> import torch
        >>> class Model(torch.nn.Linear):
        ...     def train_step(self, data, optimizer):
        ...         return dict(loss=self(data).square().mean())
        >>> model = Model(2, 1)
        >>> runner = EpochBasedRunner(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_epochs=2)
        >>> runner.register_training_hooks(dict(policy="step", step=[1]), optimizer_config=dict())
        >>> runner.run([torch.ones(3, 4, 2)], [("train", 1)])
        >>> runner.epoch, runner.iter
        (2, 6)
    """

    _kind: ClassVar[str] = "epoch"
    _open: Batches | None = None
    _opening: dict[str, Any] | None = None

    def run(
        self,
        data_loaders: Sequence[Any],
        workflow: Sequence[tuple[str, int]],
        max_epochs: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Train until ``max_epochs`` epochs are finished.

        Args:
            data_loaders: one per entry of the workflow.
            workflow: ``[("train", 2), ("val", 1)]`` trains two epochs, validates once, and so on. The last round trains
                only the epochs that are left.
            max_epochs: deprecated; pass it to the runner's constructor.
            kwargs: passed to ``train_step`` and ``val_step``.

        Raises:
            ConfigError: the runner has no length, or the workflow cannot be run.
        """
        if max_epochs is not None:
            warnings.warn(
                "max_epochs of run() is deprecated; write EpochBasedRunner(..., max_epochs=12)",
                DeprecationWarning,
                stacklevel=2,
            )
            self._max_epochs = max_epochs
        if self._max_epochs is None:
            raise ConfigError("this runner has no length; write EpochBasedRunner(..., max_epochs=12)")
        flows = parse_workflow(self, data_loaders, workflow)
        self._max_iters = self._max_epochs * len(next(flow.loader for flow in flows if flow.mode == "train"))
        self._begin(flows, f"{self._max_epochs} epochs")
        place = self._find_place()
        if place is not None:
            self._opening = rescale(place["open"], place["world_size"], self._world_size)
        self._run_flows(kwargs)
        self.call_hook("after_run")
        self._run_deferred()

    def train(self, data_loader: Any, **kwargs: Any) -> None:
        """Train for one epoch."""
        self._enter("train", data_loader)
        self._max_iters = None if self._max_epochs is None else self._max_epochs * len(data_loader)
        for batch in self._pass(data_loader):
            self._train_batch(batch, kwargs)
            self._run_deferred()
        self.call_hook("after_train_epoch")
        self._epoch += 1
        self._end_turn()

    def val(self, data_loader: Any, **kwargs: Any) -> None:
        """Validate on one pass over the data, without gradients."""
        self._enter("val", data_loader)
        for batch in self._pass(data_loader):
            self._val_batch(batch, kwargs)
            self._run_deferred()
        self.call_hook("after_val_epoch")
        self._end_turn()

    def save_checkpoint(
        self,
        out_dir: StrPath,
        filename_tmpl: str = "epoch_{}.pth",
        save_optimizer: bool = True,
        meta: Mapping[str, Any] | None = None,
        create_symlink: bool = True,
    ) -> None:
        """Save the run to ``out_dir``, created if missing, with a link ``latest.pth``.

        ``filename_tmpl`` takes the epoch, counted from 1. :meth:`write_checkpoint` has the other arguments.
        """
        number = max(self._epoch, 1) if self._stage is None else self._epoch + 1
        path = checkpoint_path(out_dir, filename_tmpl, number)
        self.write_checkpoint(path, save_optimizer, meta, create_symlink)

    def _enter(self, mode: str, data_loader: Any) -> None:
        self.model.train(mode == "train")
        self.mode = mode
        self.data_loader = data_loader
        self.call_hook(f"before_{mode}_epoch")

    def _pass(self, data_loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch; in the first epoch after a resume, the remaining ones."""
        resumed, self._opening = self._opening, None
        self._open = Batches(data_loader, resumed)
        self._load_late_weights()
        if resumed is not None:
            # Again, because the stage before the epoch was called again and skipping batches drew random numbers.
            self._restore()
        self._resumed = None
        for batch in self._open:
            self._inner_iter = self._open.num_batches - 1
            yield batch

    def _end_turn(self) -> None:
        super()._end_turn()
        self._open = None
        self._run_deferred()

    def _data_state(self) -> dict[str, Any]:
        passing = None if self._ends_turn else self._open
        return {"open": None if passing is None else passing.state_dict(self._is_begun)}

    def _foreign_counters(self, meta: Mapping[str, Any]) -> tuple[int, int]:
        return meta["epoch"], meta["iter"]
