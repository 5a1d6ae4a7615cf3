"""Fp16OptimizerHook and GradientCumulativeFp16OptimizerHook: half-precision steps. Compatible with mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from halfpeak.checkpoint.scaler_states import to_grad_scaler
from halfpeak.core.decide import LossFacts, decide
from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import ConfigError, OrderError
from halfpeak.core.keywords import known_keywords
from halfpeak.core.schedule import ScaleConfig, ScalerState, ScaleState
from halfpeak.core.step_result import StepResult
from halfpeak.optim.arguments import require_flag
from halfpeak.optim.unwrap import unwrap
from halfpeak.parts.found_inf import FoundInfReducer
from halfpeak.parts.model_hooks import owner_of
from halfpeak.parts.nonfinite import NonfiniteReport
from halfpeak.parts.parts import Parts
from halfpeak.parts.scaled_pass import ScaledPass
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.distributed import allreduce_grads, broadcast_tensors, get_dist_info, parse_bucket_size
from halfpeak.runner.fp16_model import (
    Mode,
    is_decorated,
    parse_low,
    parse_mode,
    prepare_fp16,
    reduces_itself,
)
from halfpeak.runner.hook import RunState
from halfpeak.runner.hooks.optimizer import GradientCumulativeOptimizerHook, OptimizerHook, require_optimizer
from halfpeak.runner.loss_scaler import MMCV_RULE, TORCH_RULE, HookLossScaler, parse_loss_scale


@HOOKS.register_module()
class Fp16OptimizerHook(OptimizerHook):
    """Scales the loss, runs backward, unscales the gradients, and steps unless one is not finite.

    ::

        before_run          model to half, normalisation layers float32; float32 weights in the optimizer
        after_train_iter    zero_grad; backward of loss * scale; gradients become float32, divided by the scale
                            copy_grads_to_fp32; average over the ranks; look for inf and nan; clip
                            optimizer.step(), copy_params_to_fp16; or skip
                            update the scale; runner.meta["fp16"]["loss_scaler"]

    With ``mode="autocast"`` weights stay float32 and ``torch.autocast`` casts, as in mmcv 1.7.2 with today's torch: in methods
    with ``auto_fp16``, or around ``train_step`` if the model has none.

    Args:
        grad_clip: as in :class:`OptimizerHook`.
        coalesce: reduce gradients over the ranks in buckets.
        bucket_size_mb: size of a bucket in MiB; -1 for one bucket per dtype and device.
        loss_scale: a number (static), ``"dynamic"``, or a dict; see :func:`~halfpeak.runner.loss_scaler.parse_loss_scale`.
        distributed: with several ranks, average the gradients of a model that no wrapper reduces.
        mode: ``"master"`` or ``"autocast"``.
        dtype: the low dtype, ``"float16"`` or ``"bfloat16"``.

    Raises:
        ConfigError: a value out of range, an unknown key, mode or dtype.
    """

    @known_keywords()
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
        super().__init__(grad_clip, skip_nonfinite=True)
        self.mode: Mode = parse_mode(mode)
        self.dtype = parse_low(dtype)
        self.coalesce = require_flag("coalesce", coalesce)
        self.distributed = require_flag("distributed", distributed)
        parse_bucket_size(bucket_size_mb)
        self.bucket_size_mb = bucket_size_mb
        rule = TORCH_RULE if self.mode == "autocast" else MMCV_RULE
        self.loss_scaler = HookLossScaler(parse_loss_scale(loss_scale, rule) or ScaleConfig.static())
        """The loss scale, which an ``after_train_iter`` of user code may use."""
        self._parts: Parts | None = None
        self._casts_all = self._averages = False
        self._reducer = FoundInfReducer()

    @property
    def _prepared(self) -> Parts:
        if self._parts is None:
            raise OrderError(
                f"{type(self).__name__} prepares the model in before_run; call super().before_run(runner) in an override"
            )
        return self._parts

    def before_run(self, runner: RunState) -> None:
        """Prepare model and optimizer, and restore the loss scale of a resumed run from ``runner.meta``.

        Raises:
            ConfigTypeError: the runner has no optimizer, or several.
            OrderError: another hook has prepared the model.
            StateError: the entry of ``runner.meta`` is not the state of a loss scaler.
        """
        super().before_run(runner)
        if self._parts is None:
            self._parts = self._prepare(runner)
        self.loss_scaler.enter_run(self._parts, (_meta_of(runner).get("fp16") or {}).get("loss_scaler"))

    def before_train_epoch(self, runner: RunState) -> None:
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

    def around_train_step(self, runner: RunState) -> AbstractContextManager[Any] | None:
        """Let weights and masters agree, also where ``train_step`` does not call ``forward``; cast what no one casts."""
        self._prepared.agree_for_forward()
        return self._casts()

    def around_val_step(self, runner: RunState) -> AbstractContextManager[Any] | None:
        """The same autocast in validation, where a model with ``auto_fp16`` casts too."""
        return self._casts()

    def after_run(self, runner: RunState) -> None:
        """Release the optimizer for another runner. With masters it stays prepared, to keep the master weights."""
        super().after_run(runner)
        if self.mode == "autocast" and self._parts is not None:
            self._parts.remove()
            self._parts = None

    def copy_grads_to_fp32(self, fp16_net: nn.Module, fp32_weights: Iterable[Tensor]) -> None:
        """Give the float32 weights the gradients of the model. In the hook's own pass they share them already.

        After a ``backward()`` of user code, the half gradients become float32 here, and stay scaled.
        """
        self._prepared.agree()

    def copy_params_to_fp16(self, fp16_net: nn.Module, fp32_weights: Iterable[Tensor]) -> None:
        """Round the float32 weights into the model. With ``mode="autocast"`` there are none, and nothing happens."""
        self._prepared.pairs.publish()

    @property
    def _scale_update_param(self) -> float | None:
        """The argument of ``loss_scaler.update`` in user code: a static scale, or None."""
        config = self.loss_scaler.scaler.config
        return None if config.dynamic else config.init

    def _prepare(self, runner: RunState) -> Parts:
        optimizer, inner = require_optimizer(runner, self), unwrap(runner.model)
        if owner_of(inner) is not None:
            raise OrderError(
                f"{type(self).__name__} cannot prepare this {type(inner).__name__}, which another optimizer hook, "
                "halfpeak.prepare or amp.initialize has prepared; register one optimizer hook per run, and for a second run "
                "call run() of the same runner"
            )
        parts = prepare_fp16(runner.model, optimizer, mode=self.mode, dtype=self.dtype)
        several = get_dist_info()[1] > 1
        self._averages = self.distributed and several and not reduces_itself(runner.model, optimizer)
        self._reducer = FoundInfReducer("world" if self._averages else None)
        if self._averages:
            # No wrapper broadcasts the initial weights. Averaged gradients then keep the ranks equal.
            broadcast_tensors((*inner.parameters(), *inner.buffers(), *parts.pairs.masters))
        self._casts_all = not is_decorated(inner)
        return parts

    def _casts(self) -> AbstractContextManager[Any] | None:
        return torch.autocast(self._prepared.device.type, self.dtype) if self._casts_all else None

    def _zero_grad(self, runner: RunState) -> None:
        super()._zero_grad(runner)
        runner.model.zero_grad()  # also of parameters that the optimizer does not have

    def _backward(self, runner: RunState, loss: Tensor) -> None:
        parts = self._prepared
        with ScaledPass(
            parts,
            loss,
            self.loss_scaler.scaler,
            notes_nonfinite_loss=self._reducer.reaches_all_ranks,
        ) as one:
            one.loss.backward()

    def _end_pass(self, runner: RunState) -> None:
        found_inf = self._prepared.found_inf()
        runner.step_result = StepResult(found_inf, self.loss_scaler.scaler.state.scale, boundary=False)

    def _step(self, runner: RunState) -> None:
        parts, scaler = self._prepared, self.loss_scaler.scaler
        optimizer = require_optimizer(runner, self)
        window = parts.window_of(optimizer)
        self.copy_grads_to_fp32(runner.model, window.mains)
        window.agree()
        window.unscale()
        if self._averages:
            allreduce_grads(window.mains, self.coalesce, self.bucket_size_mb)
        parts.agree()
        exist = not window.is_empty()
        found = parts.found_inf([window])
        if scaler in window.losses:  # where the loss itself is not finite, its scale stays
            noted = window.losses[scaler].found
            found = torch.where(noted != 0, noted, found)
        self._reducer.all_reduce_(found)
        loss = LossFacts(scaler.config, scaler.state, scaler.state.scale, found)
        moved = decide(found, [loss]).states[0]
        # The only wait of a step: what the host needs comes in one piece.
        found_on_host, *numbers = torch.stack([found, *(one.to(found) for one in moved)]).tolist()
        skip = found_on_host > 0
        parts.stats.end_step(skip)
        nonfinite = None
        if skip:
            report = NonfiniteReport(parts)
            error = report.error_if_exhausted([(scaler, moved)], [window])
            if error is not None:
                raise error
            nonfinite = report.nonfinite_grads([window])
        norm = self._clip(runner, window.mains)
        if not skip:
            optimizer.step()
            self.copy_params_to_fp16(runner.model, window.mains)
            parts.pairs.record_published(window.indices)  # also what an override has written
        window.close()
        self._update_scale(runner, moved, numbers, skip)
        runner.step_result = StepResult(
            (found != 0).to(found), moved.scale, norm, has_gradients=exist, grads=nonfinite
        )

    def _update_scale(
        self, runner: RunState, moved: ScaleState, numbers: Sequence[float], skip: bool
    ) -> None:
        """Move the loss scale, note it in ``runner.meta`` as mmcv does in this mode, and log a skip."""
        scaler, (scale, clean, grace, stuck) = self.loss_scaler.scaler, numbers
        scaler.state = moved
        self.loss_scaler.count(skip)
        if self.mode == "master":
            state = self.loss_scaler.state_with(scale)
        else:
            known: ScalerState = {
                "scale": scale,
                "clean": int(clean),
                "grace": int(grace),
                "stuck": int(stuck),
            }
            state = to_grad_scaler(known, scaler.config)
        _meta_of(runner).setdefault("fp16", {})["loss_scaler"] = state
        if skip:
            is_dynamic = scaler.config.dynamic
            did = "downscale loss scale to" if is_dynamic else "skip a step at the static loss scale"
            runner.logger.warning(f"Check overflow, {did} {scale}")


@HOOKS.register_module()
class GradientCumulativeFp16OptimizerHook(GradientCumulativeOptimizerHook, Fp16OptimizerHook):
    """The windows of :class:`GradientCumulativeOptimizerHook` with the steps of :class:`Fp16OptimizerHook`.

    The gradients of a window are summed in float32. An overflow in any iteration of the window skips its step.

    >>> hook = GradientCumulativeFp16OptimizerHook(cumulative_iters=4, loss_scale="dynamic", mode="master")
    >>> hook.cumulative_iters, hook.mode
    (4, 'master')
    """

    def _backward(self, runner: RunState, loss: Tensor) -> None:
        # Told here, because train_step need not call forward.
        self._prepared.reduces = {runner.model: not self._is_local}
        super()._backward(runner, loss)


def _meta_of(runner: RunState) -> dict[str, Any]:
    """``runner.meta``, created empty for a runner without it."""
    if getattr(runner, "meta", None) is None:
        runner.meta = {}
    return runner.meta
