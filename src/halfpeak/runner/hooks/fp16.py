"""Fp16OptimizerHook and GradientCumulativeFp16OptimizerHook: half-precision steps. Compatible with mmcv 1.7.2."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.checkpoint.scaler_states import from_mmcv, to_grad_scaler, to_mmcv
from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import ConfigError, OrderError
from halfpeak.core.schedule import ScaleConfig
from halfpeak.engine.engine import Engine
from halfpeak.optim.arguments import require_flag
from halfpeak.optim.loss_scale import MMCV_RULE, TORCH_RULE, SkipCount, parse_loss_scale
from halfpeak.optim.unwrap import unwrap
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.distributed import allreduce_grads, broadcast_tensors, get_dist_info, parse_bucket_size
from halfpeak.runner.fp16_model import (
    Mode,
    build_fp16_engine,
    is_decorated,
    parse_low,
    parse_mode,
    reduces_itself,
)
from halfpeak.runner.hook import RunnerView
from halfpeak.runner.hooks.optimizer import GradientCumulativeOptimizerHook, OptimizerHook
from halfpeak.runner.loss_scaler import LossScaler
from halfpeak.state.found_inf import FoundInfReducer
from halfpeak.state.loss_scaler import LossScaler as EngineScaler


@HOOKS.register_module()
class Fp16OptimizerHook(OptimizerHook):
    """Scales the loss, runs backward, unscales the gradients, and steps unless one is not finite.

    ::

        mode       weights   forward pass                                      optimizer steps
        master     low       low, normalisation layers float32                 float32 masters, rounded into the weights
        autocast   float32   torch.autocast: in methods with auto_fp16, or     the weights
                             around train_step where the model has none

    Low means ``dtype``. ``master`` is what mmcv documents: scale, backward in half precision, copy gradients to
    float32, unscale, update, copy back. ``autocast`` is what mmcv 1.7.2 does with torch 1.6 or newer. With masters and
    no ``auto_fp16``, ``forward`` computes low and returns float32, and autocast casts the rest of ``train_step``.

    ``runner.meta["fp16"]["loss_scaler"]`` shows the state of the loss scale; reading it waits for the device. A resumed
    run restores the loss scale from this entry in :meth:`before_run`.

    Args:
        grad_clip: as in :class:`OptimizerHook`; unscaled gradients are clipped.
        coalesce: reduce gradients over the ranks in buckets.
        bucket_size_mb: size of a bucket in MiB; -1 for one bucket per dtype and device.
        loss_scale: a number (a static scale), ``"dynamic"``, or a dict; see
            :func:`~halfpeak.optim.loss_scale.parse_loss_scale`. ``"dynamic"`` means the constants of mmcv's
            ``LossScaler`` (initial scale 2**32) with ``mode="master"`` and torch's with ``mode="autocast"``.
        distributed: with several ranks, average the gradients of a model without DDP, FSDP or sharded parameters.
        mode: ``"master"`` or ``"autocast"``.
        dtype: ``"float16"`` or ``"bfloat16"``.

    Attributes:
        loss_scaler: a :class:`HookLossScaler`; during a run it shows the engine's loss scale.

    Raises:
        ConfigError: a value out of range, an unknown key, mode or dtype, or an override that is never called.

    >>> Fp16OptimizerHook(loss_scale="dynamc")
    Traceback (most recent call last):
    ...
    halfpeak.core.errors.ConfigTypeError: loss_scale must be of type float, int or dict, or 'dynamic', not 'dynamc'; ...
    """

    _steps_foreign = False

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
        _refuse_overrides(type(self))
        super().__init__(grad_clip)
        self.mode: Mode = parse_mode(mode)
        self.dtype = parse_low(dtype)
        self.coalesce = require_flag("coalesce", coalesce)
        self.distributed = require_flag("distributed", distributed)
        parse_bucket_size(bucket_size_mb)
        self.bucket_size_mb = bucket_size_mb
        rule = TORCH_RULE if self.mode == "autocast" else MMCV_RULE
        self._scale = parse_loss_scale(loss_scale, rule) or ScaleConfig.static()
        self.loss_scaler = HookLossScaler.of(self._scale)
        self._record: ScalerRecord | None = None
        self._reduces = False
        self._casts_all = False
        self._skips: SkipCount | None = None

    def before_run(self, runner: RunnerView) -> None:
        """Prepare model and optimizer, and restore the loss scale of a resumed run.

        Raises:
            StateError: the entry of ``runner.meta`` is not the state of a loss scaler.
        """
        super().before_run(runner)
        self._restore_scale(self._ready(runner), _meta_of(runner))

    def before_train_epoch(self, runner: RunnerView) -> None:
        """Check that user code has left ``fp16_enabled`` on where weights are low.

        Raises:
            ConfigError: it has switched it off in a module, which would compute in the low dtype all the same, or fail.
        """
        super().before_train_epoch(runner)
        for name, module in unwrap(runner.model).named_modules() if self.mode == "master" else ():
            if getattr(module, "fp16_enabled", None) is False and any(map(is_low, module.parameters())):
                raise ConfigError(
                    f"fp16_enabled of {name!r} is False, but mode='master' has made its weights {self.dtype}; write "
                    "mode='autocast', in which such a module computes in float32"
                )

    def after_run(self, runner: RunnerView) -> None:
        """Replace the live record in ``runner.meta`` by plain numbers. Waits for the device."""
        if self._record is not None:
            _meta_of(runner).setdefault("fp16", {})["loss_scaler"] = self._record.read()
        super().after_run(runner)

    @property
    def _scale_update_param(self) -> float | None:
        """The argument of ``loss_scaler.update`` in user code: a static scale, or None."""
        return None if self._scale.dynamic else self._scale.init

    def copy_grads_to_fp32(self, fp16_net: nn.Module, fp32_weights: Iterable[Tensor]) -> None:
        """Move the scaled gradients of the model to the masters, for an ``after_train_iter`` of user code.

        With ``mode="autocast"`` there are no masters and nothing happens.
        """
        for parameter, master in [] if self._engine is None else self._engine.masters:
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.to(master.dtype), None

    def copy_params_to_fp16(self, fp16_net: nn.Module, fp32_weights: Iterable[Tensor]) -> None:
        """Do nothing, because ``optimizer.step()`` has already rounded the masters into the weights."""

    def around_train_step(self, runner: RunnerView) -> AbstractContextManager[Any] | None:
        """Autocast for a model without ``auto_fp16``."""
        super().around_train_step(runner)
        return self._casts(runner)

    def around_val_step(self, runner: RunnerView) -> AbstractContextManager[Any] | None:
        """The same autocast in validation, where a model with ``auto_fp16`` casts too."""
        return self._casts(runner)

    def _casts(self, runner: RunnerView) -> AbstractContextManager[Any] | None:
        if not self._casts_all:
            return None
        return torch.autocast(self._ready(runner).device.type, self.dtype)

    def _build(self, runner: RunnerView, optimizer: Optimizer) -> Engine:
        inner = unwrap(runner.model)
        is_alone = get_dist_info()[1] == 1 or reduces_itself(runner.model, optimizer)
        self._reduces = self.distributed and not is_alone
        engine = build_fp16_engine(
            runner.model,
            optimizer,
            mode=self.mode,
            dtype=self.dtype,
            scale=self._scale,
            clip=self._engine_clip,
            reducer=FoundInfReducer("world" if self._reduces else None),
            stepped_by="either" if self._overrides_step else "engine",
        )
        if self._reduces:
            # No wrapper broadcasts the initial weights. Averaged gradients then keep the ranks equal.
            masters = (master for _, master in engine.masters)
            broadcast_tensors((*inner.parameters(), *inner.buffers(), *masters))
        self._casts_all = not is_decorated(inner)
        self.loss_scaler.follow(engine.scalers[0])
        self.loss_scaler.engine = engine
        self._record = ScalerRecord(engine.scalers[0], as_mmcv=self.mode == "master")
        self._skips = SkipCount(engine)
        return engine

    def _zero_grad(self, runner: RunnerView) -> None:
        super()._zero_grad(runner)
        # As the original; the optimizer may be given the others later, or a hook steps them.
        unwrap(runner.model).zero_grad()

    def _restore_scale(self, engine: Engine, meta: Mapping[str, Any]) -> None:
        """Restore the loss scale from ``meta``. A static scale keeps its configured value."""
        saved = (meta.get("fp16") or {}).get("loss_scaler")
        scaler = engine.scalers[0]
        if saved:
            numbers = from_mmcv(saved)
            fixed = {} if scaler.config.dynamic else {"scale": scaler.read_scale()}
            scaler.load_translated({**numbers, **fixed})

    def _update(self, runner: RunnerView, engine: Engine, *, keep_gradients: bool) -> None:
        if self._reduces:
            engine.unscale_pending()
            allreduce_grads(engine.main_params(), self.coalesce, self.bucket_size_mb)
        super()._update(runner, engine, keep_gradients=keep_gradients)
        _meta_of(runner).setdefault("fp16", {})["loss_scaler"] = self._record
        self._report(runner, engine)

    def _report(self, runner: RunnerView, engine: Engine) -> None:
        """Log a skipped step when the count of skipped steps has reached the host. Waits only after an overflow."""
        if self._skips is not None and self._skips.has_grown(engine):
            scale = engine.read_scale()  # waits for the device
            did = "downscale loss scale to" if self._scale.dynamic else "skip a step at the static loss scale"
            runner.logger.warning(f"Check overflow, {did} {scale}")


@HOOKS.register_module()
class GradientCumulativeFp16OptimizerHook(GradientCumulativeOptimizerHook, Fp16OptimizerHook):
    """The windows of :class:`GradientCumulativeOptimizerHook` with the steps of :class:`Fp16OptimizerHook`.

    The gradients of a window are summed in float32. An overflow in any iteration of the window skips its step.

    >>> hook = GradientCumulativeFp16OptimizerHook(cumulative_iters=4, loss_scale="dynamic", mode="master")
    >>> hook.cumulative_iters, hook.mode
    (4, 'master')
    """


class HookLossScaler(LossScaler):
    """A hook's loss scale, for an ``after_train_iter`` of user code: as mmcv's ``LossScaler``, or as a ``GradScaler``.

    ::

        scale(loss).backward()   gradients wait scaled, until unscale_ or step
        unscale_                 the engine unscales them, into the masters if there are any
        step                     the optimizer steps, or skips, and the scale moves
        update                   sets a scale that is given; otherwise nothing is left to do

    Attributes:
        engine: the engine of the hook; None before the run.
    """

    engine: Engine | None = None
    _has_scaled: bool = False

    def scale(self, outputs: Tensor) -> Tensor:
        """Multiply a loss by the scale."""
        self._has_scaled = True
        return self._scaler.scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients. A second call changes nothing.

        Raises:
            OrderError: the run has not begun.
        """
        if self.engine is None:
            raise OrderError(
                "the hook's loss_scaler unscales gradients only in a run; call runner.run() first"
            )
        if self._has_scaled:
            self._has_scaled = False
            self.engine.adopt_scaled_grads()
        self.engine.unscale()

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call :meth:`unscale_`, then ``optimizer.step``, which skips if a gradient is not finite."""
        self.unscale_(optimizer)
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | None = None) -> None:
        """Set the scale, if ``new_scale`` is given. Otherwise do nothing, because the step has moved the scale."""
        if new_scale is not None:
            self._scaler.set_scale(float(new_scale))

    def state_dict(self) -> dict[str, Any]:
        """The state, with mmcv's six keys; in a run the engine's counts. Waits for the device."""
        if self.engine is None:
            return super().state_dict()
        return to_mmcv(self._scaler.state_dict(), self._scaler.config)


class ScalerRecord(Mapping[str, Any]):
    """The current state of a loss scaler, as a mapping with the keys that mmcv writes.

    Copying or pickling the record gives a dict of plain numbers.

    Args:
        scaler: the scaler, kept by reference.
        as_mmcv: use the six keys of mmcv's ``LossScaler``; otherwise those of ``torch.amp.GradScaler``.

    >>> import copy
    >>> from halfpeak.core.schedule import ScaleConfig
    >>> record = ScalerRecord(EngineScaler(ScaleConfig(init=8.0)), as_mmcv=False)
    >>> record["scale"], type(copy.deepcopy(record))
    (8.0, <class 'dict'>)
    """

    def __init__(self, scaler: EngineScaler, *, as_mmcv: bool) -> None:
        self._scaler, self._as_mmcv = scaler, as_mmcv

    def read(self) -> dict[str, Any]:
        """The state as a dict. Waits for the device."""
        translate = to_mmcv if self._as_mmcv else to_grad_scaler
        return translate(self._scaler.state_dict(), self._scaler.config)

    def __getitem__(self, key: str) -> Any:
        return self.read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def __repr__(self) -> str:
        return repr(self.read())

    def __copy__(self) -> dict[str, Any]:
        return self.read()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return self.read()

    def __reduce__(self) -> tuple[Any, ...]:
        # OrderedDict is a mapping that torch.load(weights_only=True) can rebuild.
        return OrderedDict, (), None, None, iter(self.read().items())


def _refuse_overrides(cls: type) -> None:
    """Refuse overrides of ``copy_grads_to_fp32`` and ``copy_params_to_fp16`` in a class that does not step itself.

    Nothing would call such an override, so it raises ConfigError.
    """
    if not cls.after_train_iter.__module__.startswith("halfpeak."):  # type: ignore[attr-defined]
        return
    for name, does in (
        ("copy_grads_to_fp32", "adds gradients to float32 masters"),
        ("copy_params_to_fp16", "rounds the masters into the weights"),
    ):
        if getattr(cls, name) is not getattr(Fp16OptimizerHook, name):
            raise ConfigError(
                f"{cls.__name__} overrides {name}, which is not called: the engine {does}; override clip_grads(params), which "
                "gets the unscaled float32 gradients before the step, or register a hook that changes the weights after it"
            )


def _meta_of(runner: RunnerView) -> dict[str, Any]:
    """``runner.meta``, created empty for a runner without it."""
    if getattr(runner, "meta", None) is None:
        runner.meta = {}
    return runner.meta
