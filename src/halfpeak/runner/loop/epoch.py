"""EpochBasedRunner: the training loop that counts epochs. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from halfpeak.core.errors import ConfigError
from halfpeak.runner.builder import RUNNERS
from halfpeak.runner.checkpoint import StrPath, checkpoint_path
from halfpeak.runner.loop.base import BaseRunner
from halfpeak.runner.loop.data import parse_workflow


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

    See :class:`BaseRunner` for the arguments.

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
        length = len(next(flow.loader for flow in flows if flow.mode == "train"))
        self._max_iters = self._max_epochs * length
        if self._resumed is not None and self._iter > self._epoch * length:
            self.logger.warning("the file was saved inside epoch %d, which begins again", self._epoch + 1)
            self._iter = self._epoch * length
        self._begin(flows, f"{self._max_epochs} epochs")
        self._run_workflow(flows, kwargs)
        self._end()

    def train(self, data_loader: Any, **kwargs: Any) -> None:
        """Train for one epoch."""
        self._enter("train", data_loader)
        self._max_iters = None if self._max_epochs is None else self._max_epochs * len(data_loader)
        for self._inner_iter, batch in enumerate(data_loader):
            self._train_batch(batch, kwargs)
        self.call_hook("after_train_epoch")
        self._epoch += 1

    def val(self, data_loader: Any, **kwargs: Any) -> None:
        """Validate on one pass over the data, without gradients."""
        self._enter("val", data_loader)
        for self._inner_iter, batch in enumerate(data_loader):
            self._val_batch(batch, kwargs)
        self.call_hook("after_val_epoch")

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

    def _counters_of_mmcv(self, meta: Mapping[str, Any]) -> tuple[int, int]:
        return meta["epoch"], meta["iter"]
