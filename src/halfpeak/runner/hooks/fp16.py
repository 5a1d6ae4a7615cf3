"""Fp16OptimizerHook: a half-precision step after each iteration. Answers to mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from halfpeak.checkpoint.foreign import from_mmcv
from halfpeak.core.errors import OrderError
from halfpeak.engine.engine import Engine
from halfpeak.optim.wrapped import has_shards, unwrap
from halfpeak.parts.lagged import Lagged
from halfpeak.parts.verdict import Verdict
from halfpeak.runner.allreduce import allreduce_grads, broadcast_tensors, parse_bucket_size
from halfpeak.runner.dist import get_dist_info
from halfpeak.runner.fp16_engine import build_fp16_engine, reduces_itself
from halfpeak.runner.fp16_model import Mode, is_decorated, parse_low, parse_mode
from halfpeak.runner.hooks.checks import require_flag
from halfpeak.runner.hooks.optimizer import OptimizerHook
from halfpeak.runner.scale_rules import MMCV_RULE, TORCH_RULE, parse_loss_scale
from halfpeak.runner.scaler_record import ScalerRecord

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner


class Fp16OptimizerHook(OptimizerHook):
    """Scales the loss, runs backward, unscales, and steps unless a gradient is not finite.

    ::

        mode       weights   forward pass                                      optimizer steps
        master     low       low, normalisation layers float32                 float32 masters, rounded into the weights
        autocast   float32   torch.autocast: in methods with auto_fp16, or     the weights
                             around train_step where the model has none

    ``master`` is what mmcv documents: scale, backward in half, copy the gradients to float32, unscale and update, copy back.
    ``autocast`` is what mmcv 1.7.2 does where torch is 1.6 or newer. With masters and no ``auto_fp16``, ``forward`` takes
    and computes in the low dtype and returns float32, and what ``train_step`` computes outside of it is cast by autocast.

    The state of the loss scale lies in ``runner.meta["fp16"]["loss_scaler"]``, is read when somebody looks, and is taken
    up from there in :meth:`before_run`.

    Args:
        grad_clip: as in :class:`OptimizerHook`; true-sized gradients are clipped.
        coalesce: reduce gradients over the ranks in buckets.
        bucket_size_mb: their size in MiB; -1 for one bucket per dtype and device.
        loss_scale: a number (a static scale), ``"dynamic"``, or a dict; see
            :func:`~halfpeak.runner.scale_rules.parse_loss_scale`. ``"dynamic"`` means the constants of mmcv's
            ``LossScaler`` (from 2**32 on) with ``mode="master"`` and torch's with ``mode="autocast"``.
        distributed: with several ranks, average the gradients of a model that no ``DistributedDataParallel`` is around.
        mode: ``"master"`` or ``"autocast"``.
        dtype: ``"float16"`` or ``"bfloat16"``.

    Raises:
        ConfigError: a value out of range, an unknown key, mode or dtype.

    >>> Fp16OptimizerHook(loss_scale="dynamc")
    Traceback (most recent call last):
    ...
    halfpeak.core.errors.ConfigTypeError: loss_scale must be of type float, int or dict, or 'dynamic', not 'dynamc'; ...
    """

    def __init__(
        self,
        grad_clip: Mapping[str, Any] | None = None,
        coalesce: bool = True,
        bucket_size_mb: float = -1,
        loss_scale: float | str | Mapping[str, Any] = 512.0,
        distributed: bool = True,
        *,
        mode: Mode = "master",
        dtype: torch.dtype | str = torch.float16,
    ) -> None:
        super().__init__(grad_clip)
        self.mode: Mode = parse_mode(mode)
        self.dtype = parse_low(dtype)
        self.coalesce = require_flag("coalesce", coalesce)
        self.distributed = require_flag("distributed", distributed)
        parse_bucket_size(bucket_size_mb)
        self.bucket_size_mb = bucket_size_mb
        self._scale = parse_loss_scale(loss_scale, TORCH_RULE if self.mode == "autocast" else MMCV_RULE)
        self._record: ScalerRecord | None = None
        self._reduces = False
        self._casts_all = False
        self._skipped = 0.0
        self._lagged: Lagged | None = None

    @property
    def loss_scaler(self) -> ScalerRecord:
        """The loss scale, to look at: ``hook.loss_scaler.loss_scale``.

        Raises:
            OrderError: before :meth:`before_run`.
        """
        if self._record is None:
            raise OrderError("the loss scale begins with the run; look at hook.loss_scaler after before_run")
        return self._record

    def before_run(self, runner: BaseRunner) -> None:
        """Make model and optimizer ready and take up the loss scale of a resumed run.

        Raises:
            StateError: ``runner.meta`` holds another thing in its place.
        """
        super().before_run(runner)
        self._take_up(self._ready(runner), runner.meta)

    def after_run(self, runner: BaseRunner) -> None:
        """Leave plain numbers in ``runner.meta``. Waits for the device."""
        if self._record is not None:
            runner.meta.setdefault("fp16", {})["loss_scaler"] = self._record.read()
        super().after_run(runner)

    def around_train_step(self, runner: BaseRunner) -> AbstractContextManager[Any] | None:
        """The casts of a model that does not say itself where it computes in the low dtype."""
        return self._casts(runner)

    def around_val_step(self, runner: BaseRunner) -> AbstractContextManager[Any] | None:
        """The same casts: a model with ``auto_fp16`` validates as it trains, and so does one without."""
        return self._casts(runner)

    def _casts(self, runner: BaseRunner) -> AbstractContextManager[Any] | None:
        if not self._casts_all:
            return None
        return torch.autocast(self._ready(runner).device.type, self.dtype)

    def _build(self, runner: BaseRunner, optimizer: Optimizer) -> Engine:
        inner = unwrap(runner.model)
        is_alone = get_dist_info()[1] == 1 or reduces_itself(runner.model, optimizer)
        self._reduces = self.distributed and not is_alone
        engine = build_fp16_engine(
            runner.model,
            optimizer,
            mode=self.mode,
            dtype=self.dtype,
            scale=self._scale,
            clip=self._clip,
            verdict=Verdict("world" if self._reduces or has_shards(optimizer) else None),
        )
        if self._reduces:
            # Nobody else makes the ranks equal; averaged gradients keep them so.
            masters = (master for _, master in engine.masters)
            broadcast_tensors((*inner.parameters(), *inner.buffers(), *masters))
        self._casts_all = not is_decorated(inner)
        self._record = ScalerRecord(engine.scalers[0], as_mmcv=self.mode == "master")
        self._lagged, self._skipped = Lagged(engine.device), 0.0
        return engine

    def _take_up(self, engine: Engine, meta: Mapping[str, Any]) -> None:
        """Go on with the loss scale that ``meta`` holds. A static one keeps its configured value."""
        saved = (meta.get("fp16") or {}).get("loss_scaler")
        scaler = engine.scalers[0]
        if saved:
            numbers = from_mmcv(saved)
            fixed = {} if scaler.config.dynamic else {"scale": scaler.read_scale()}
            scaler.load_state_dict({**numbers, "grace": scaler.config.hysteresis, **fixed})

    def _update(self, runner: BaseRunner, engine: Engine, *, keep_gradients: bool) -> None:
        if self._reduces:
            engine.lanes[0].take_in()
            targets = [slot.target for slot in engine.lanes[0].slots()]
            allreduce_grads(targets, self.coalesce, self.bucket_size_mb)
        super()._update(runner, engine, keep_gradients=keep_gradients)
        runner.meta.setdefault("fp16", {})["loss_scaler"] = self.loss_scaler
        self._report(runner, engine)

    def _report(self, runner: BaseRunner, engine: Engine) -> None:
        """Log a step that was skipped, as soon as that is known without waiting."""
        assert self._lagged is not None
        self._lagged.push(engine.skipped)
        if self._lagged.value > self._skipped:
            self._skipped = self._lagged.value
            scale = engine.read_scale()  # waits, and only after an overflow
            did = "downscale loss scale to" if self._scale.dynamic else "skip a step at the static loss scale"
            runner.logger.warning(f"Check overflow, {did} {scale}")
