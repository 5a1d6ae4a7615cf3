"""EpochBasedRunner and IterBasedRunner: the training loops. Compatible with mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from halfpeak.runner.builder import RUNNERS
from halfpeak.runner.checkpoint import StrPath
from halfpeak.runner.hook import Hook
from halfpeak.runner.loop.base import BaseRunner
from halfpeak.runner.loop.data import Flow, IterLoader, parse_workflow


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
        length = self._length_of_run(max_epochs)
        flows = parse_workflow(self, data_loaders, workflow)
        batches = len(next(flow.loader for flow in flows if flow.mode == "train"))
        self._max_iters = length * batches
        if self._resumed is not None and self._iter > self._epoch * batches:
            self.logger.warning("the file was saved inside epoch %d, which begins again", self._epoch + 1)
            self._iter = self._epoch * batches
        self._begin(flows, f"{length} epochs")
        self._run_workflow(flows, kwargs)
        self._end()

    def train(self, data_loader: Any, **kwargs: Any) -> None:
        """Train for one epoch."""
        self._enter("train", data_loader)
        self.call_hook("before_train_epoch")
        self._max_iters = None if self._max_epochs is None else self._max_epochs * len(data_loader)
        for self._inner_iter, batch in enumerate(data_loader):
            self._train_batch(batch, kwargs)
        self.call_hook("after_train_epoch")
        self._epoch += 1

    def val(self, data_loader: Any, **kwargs: Any) -> None:
        """Validate on one pass over the data, without gradients."""
        self._enter("val", data_loader)
        self.call_hook("before_val_epoch")
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
        self._save(self._epoch, out_dir, filename_tmpl, save_optimizer, meta, create_symlink)

    def _counters_of_mmcv(self, meta: Mapping[str, Any]) -> tuple[int, int]:
        return meta["epoch"], meta["iter"]


@RUNNERS.register_module()
class IterBasedRunner(BaseRunner):
    """Trains for a number of iterations, starting a new pass over the data whenever one ends.

    ::

        before_run, before_train_epoch
        until max_iters are finished, for each entry (mode, n) of the workflow, n times:
            before_<mode>_iter, the model's step, after_<mode>_iter
        after_train_epoch, after_run

    Hooks see the run as one epoch; :attr:`epoch` counts passes over the training data. See :class:`BaseRunner` for the
    arguments.

    Example:
        >>> import torch
        >>> class Model(torch.nn.Linear):
        ...     def train_step(self, data, optimizer):
        ...         return dict(loss=self(data).square().mean())
        >>> model = Model(2, 1)
        >>> runner = IterBasedRunner(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_iters=4)
        >>> runner.register_training_hooks(dict(policy="poly"), optimizer_config=dict())
        >>> runner.run([torch.ones(3, 4, 2)], [("train", 1)])
        >>> runner.epoch, runner.iter
        (1, 4)
    """

    _kind: ClassVar[str] = "iter"

    def run(
        self,
        data_loaders: Sequence[Any],
        workflow: Sequence[tuple[str, int]],
        max_iters: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Train until ``max_iters`` iterations are finished.

        Args:
            data_loaders: one per entry of the workflow.
            workflow: ``[("train", 1000), ("val", 10)]`` validates on 10 batches after every 1,000 batches of training.
            max_iters: deprecated; pass it to the runner's constructor.
            kwargs: passed to ``train_step`` and ``val_step``.

        Raises:
            ConfigError: the runner has no length, or the workflow cannot be run.
        """
        length = self._length_of_run(max_iters)
        flows = parse_workflow(self, data_loaders, workflow)
        flows = [flow._replace(loader=IterLoader(flow.loader, self._finished_passes(flow))) for flow in flows]
        self._begin(flows, f"{length} iters")
        self.mode = "train"
        self.data_loader = next(flow.loader for flow in flows if flow.mode == "train")
        self.call_hook("before_train_epoch")
        self._run_workflow(flows, kwargs)
        self.call_hook("after_train_epoch")
        self._end()

    def train(self, data_loader: Any, **kwargs: Any) -> None:
        """Train for one iteration. ``data_loader`` is an :class:`IterLoader`."""
        self._enter("train", data_loader)
        batch = next(data_loader)
        self._epoch = data_loader.epoch
        self._train_batch(batch, kwargs)
        self._inner_iter += 1

    def val(self, data_loader: Any, **kwargs: Any) -> None:
        """Validate on one batch, without gradients. ``data_loader`` is an :class:`IterLoader`."""
        self._enter("val", data_loader)
        self._val_batch(next(data_loader), kwargs)
        self._inner_iter += 1

    def save_checkpoint(
        self,
        out_dir: StrPath,
        filename_tmpl: str = "iter_{}.pth",
        meta: Mapping[str, Any] | None = None,
        save_optimizer: bool = True,
        create_symlink: bool = True,
    ) -> None:
        """Save the run to ``out_dir``, created if missing, with a link ``latest.pth``.

        ``filename_tmpl`` takes the iteration, counted from 1. :meth:`write_checkpoint` has the other arguments.
        """
        self._save(self._iter, out_dir, filename_tmpl, save_optimizer, meta, create_symlink)

    def _in_own_unit(self, config: Any) -> Any:
        if not isinstance(config, Mapping) or isinstance(config, Hook):
            return config
        return {"by_epoch": False, **config}

    def _finished_passes(self, flow: Flow) -> int:
        """How often the iterations so far have gone through a loader."""
        length = len(flow.loader) if flow.mode == "train" and hasattr(flow.loader, "__len__") else 0
        return self._iter // length if length else 0

    def _counters_of_mmcv(self, meta: Mapping[str, Any]) -> tuple[int, int]:
        # mmcv saves before it counts: iter_4.pth holds iter 3, and the current epoch counted from 1. An override of
        # save_checkpoint may count, so its iter is taken as it is.
        is_mmcv = type(self).save_checkpoint is IterBasedRunner.save_checkpoint
        return max(meta["epoch"] - 1, 0), meta["iter"] + is_mmcv
