"""TrainStep: the order of a training step. Every front end, closure and user-called ``optimizer.step()`` uses it.

::

    scale the loss -> backward -> unscale and accumulate in float32
    -> clip -> found_inf over ranks -> decide -> step or skip -> publish masters -> update the loss scale

Longer than 500 lines because the order of a step, and how an exception ends it, must be readable in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.casting.suspend import disable_casts
from halfpeak.core.errors import ClosureError, LossScaleCollapse, OrderError
from halfpeak.core.step_result import NonfiniteGrads, StepResult
from halfpeak.core.torch_compat import host_values, refuse_inference_mode
from halfpeak.distributed.optimizer_state import is_called_by_params
from halfpeak.engine.closures import ScaledClosure
from halfpeak.engine.config import EngineConfig
from halfpeak.engine.gradients.backward import BackwardScope
from halfpeak.engine.gradients.fused_grads import FusedGrads, norm_and_coefficient, reads_grads_itself
from halfpeak.engine.gradients.other_grads import OtherGrads, UnmanagedGrads
from halfpeak.engine.gradients.params import ParamTable
from halfpeak.engine.gradients.window import (
    Empty,
    Pending,
    Unscaled,
    refuse_only_unseen_backward,
    refuse_scaled,
    refuse_unseen_backward,
    refuse_user_step,
)
from halfpeak.engine.nonfinite import NonfiniteReport
from halfpeak.engine.optimizer import PreparedOptimizer, claim_for_thread
from halfpeak.engine.step_call import Closure, StepCall, takes_found_inf
from halfpeak.engine.step_guard import StepGuard
from halfpeak.engine.step_hooks import has_later_hooks
from halfpeak.engine.step_record import ForeignLoss, StepRecord
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import DecisionInputs, StepDecision
from halfpeak.ops import foreach, reference
from halfpeak.ops.async_scalar import AsyncScalar
from halfpeak.ops.shards import is_shard
from halfpeak.state.clip import ClipNorm, is_by_norm, is_rank_local, limit_of_norm
from halfpeak.state.found_inf import FoundInfReducer
from halfpeak.state.loss_scaler import LossScaler, is_unit, nonfinite_loss, scale_loss

OnFoundInf = Callable[[LossScaler, Tensor, Sequence[tuple[Optimizer, Tensor]]], None]
"""Called with scaler and ``found_inf`` of a backward pass, and (optimizer, ``found_inf``) of others that it reached."""


class ClippedGrads(NamedTuple):
    """What is known of the gradients of a step after clipping.

    Attributes:
        found_infs: of the step, then of each loss of the window; a scalar if the device decides.  # f32[1 + losses]
        norm: before clipping; None if the clip needs none.  # f32[]
        exist: whether there is a gradient to step.
        nonfinite: which gradients are not finite, if the host knows of one.
    """

    found_infs: Tensor
    norm: Tensor | None
    exist: bool = True
    nonfinite: NonfiniteGrads | None = None


class TrainStep:
    """The backward pass and the step as transactions: an exception undoes the pass; a step counts fully or not at all.

    An optimizer that has stepped before another one raised keeps its new weights, but the counters and the loss scale stay.

    Stores no :class:`PreparedOptimizer`: each one refers to this object, so a reference back would be a cycle.

    Args:
        record: the counters, and a decided step that is not yet applied.
        scalers: one per loss.
        reducer: reduces ``found_inf`` over ranks.
        unmanaged: unscales gradients of tensors that no prepared optimizer steps.
        nonfinite_report: names the gradients of a skipped step, and makes the error of a loss scale that cannot fall.
        device: of ``found_inf``.
    """

    def __init__(
        self,
        config: EngineConfig,
        record: StepRecord,
        scalers: Sequence[LossScaler],
        reducer: FoundInfReducer,
        unmanaged: UnmanagedGrads,
        nonfinite_report: NonfiniteReport,
        device: torch.device,
    ) -> None:
        self._config = config
        self._record = record
        self._scalers = scalers
        self.reducer = reducer
        self._unmanaged = unmanaged
        self._max_norm = limit_of_norm(config.clip)
        self._clips_by_norm = is_by_norm(config.clip)
        self._nonfinite_report = nonfinite_report
        self._device = device
        # Overflows in a row that could not lower a loss scale. Read without waiting, so a step or two late.
        self._stuck = AsyncScalar(device)
        self._patience = min(
            (s.config.patience for s in scalers if s.config.patience is not None), default=math.inf
        )

    # The backward pass.

    @contextmanager
    def backward(
        self,
        loss: Tensor,
        scaler: LossScaler,
        prepared: Sequence[PreparedOptimizer],
        *,
        delay: bool,
        on_found_inf: OnFoundInf | None,
        preserved: Sequence[PreparedOptimizer] = (),
        unreduced: Sequence[PreparedOptimizer] = (),
    ) -> Generator[Tensor]:
        """Context that yields the scaled loss for a backward pass in the body; see :meth:`halfpeak.Engine.scaled`.

        Args:
            loss: any shape.
            scaler: its scale multiplies the loss.
            prepared: the optimizers whose parameters get gradients.
            delay: leave the gradients scaled for a later pass.
            on_found_inf: see :data:`OnFoundInf`; None keeps ``found_inf`` for the next step.
            preserved: optimizers whose parameters keep the gradients they have, even if the loss depends on them.
            unreduced: those of ``prepared`` whose gradients this pass does not reduce over the ranks. They stay scaled, too.

        Raises:
            OrderError: gradients that are not reduced yet have reached another engine.
        """
        self.recover(prepared)
        known = claim_for_thread(prepared)
        scope = BackwardScope(prepared, prepared if delay else unreduced, unreduced)
        rest = [one for one in known if one not in prepared]
        others = OtherGrads([one for one in rest if one not in preserved], preserved)
        guard = None
        try:
            scale = scope.begin(scaler)
            others.stash(scope.all_pairs.model_params)
            self._unmanaged.stash(
                [*scope.pairs, *(one.pairs_now() for one in rest)],
                None if is_unit(scaler) else loss.grad_fn,
            )
            fused_step_reads = on_found_inf is None and self._fused_of(prepared) is not None
            mode = scope.mode(fused_step_reads=fused_step_reads)
            guard = StepGuard((scope, others, self._unmanaged), unit=is_unit(scaler))
            yield scale_loss(loss, scale)
            others.refuse_unreduced(prepared[0].masters, is_reduced=not unreduced)
            self._unmanaged.accumulate(scale, delay=scope.is_delayed)
            reached = others.accumulate(scaler, scale, is_reduced=not unreduced)
            scope.finish(mode, scaler, scale)
            self._note_nonfinite_loss(loss, scaler, scope.reached)
            if on_found_inf is None and not scope.is_delayed:
                self._record.add_found_inf(scaler, scope.found_inf, others.counted)
            elif on_found_inf is not None and not scope.is_delayed:
                on_found_inf(scaler, scope.found_inf, reached)
                if others.counted is not None:
                    others.counted.copy_(scope.found_inf)
        except BaseException:
            others.rollback()
            if not scope.rollback():
                self.drop_window(prepared)
            else:
                self._record.num_dropped += 1
                if scope.has_begun:
                    self._unmanaged.abort()
            raise
        finally:
            if guard is not None:
                guard.end()
            others.put_back_kept()

    def _note_nonfinite_loss(
        self, loss: Tensor, scaler: LossScaler, reached: Sequence[PreparedOptimizer]
    ) -> None:
        """Record a loss that is itself not finite: the step skips, but keeps the scale, as no scale helps.

        Does nothing where other ranks do not learn of it by ``group=``: replicas get only the gradients, which look like an
        overflow, so their scale would fall and this one stay. Does not wait for the device.
        """
        if not scaler.config.recovers or loss.numel() != 1 or is_shard(loss):
            return
        if not (self.reducer.reaches_all_ranks and scaler.config.dynamic):
            return
        nonfinite = nonfinite_loss(loss)
        if nonfinite is not None:
            self._record.add_nonfinite_loss(scaler, nonfinite)
            for one in reached:
                one.note_nonfinite_loss(nonfinite)

    # The step.

    def step(
        self,
        prepared: Sequence[PreparedOptimizer],
        closure: Closure | None = None,
        *,
        keep_gradients: bool = False,
    ) -> StepResult:
        """End a micro-step, and the window if this was its last one; see :meth:`halfpeak.Engine.step`."""
        self._record.commit()
        for one in prepared:
            one.ended = None
        if closure is not None:
            return self._step_with_closure(closure, prepared)
        if not self._config.accumulation.is_boundary(self._record.micro_step):
            self._record.micro_step += 1
            return StepResult(torch.zeros_like(prepared[0].found_inf), self._scale, None, boundary=False)
        with self._all_or_nothing(prepared):
            tables = [one.begin_step() for one in prepared]
            optimizer = self._fused_of(prepared)
            fused = (
                None if optimizer is None else self._grads_for_fused_step(prepared[0], tables[0], optimizer)
            )
            decision = None if fused is None else self._decide_on_device(prepared[0], fused)
            if decision is not None:
                grads = ClippedGrads(
                    decision.found_inf, None if self._max_norm is None else decision.grad_norm
                )
                found_inf: Tensor | bool = decision.found_inf
                result = decision.found_inf
            else:
                grads = (
                    self._clip_unscaled(prepared)
                    if fused is None
                    else self._clip_in_fused_step(prepared[0], fused)
                )
                found_infs = self.reducer.all_reduce_in_step(
                    self._of_every_loss(grads.found_infs), self._record.num_dropped, grads.norm
                )
                found_inf = self._decide(found_infs, prepared, has_gradients=grads.exist)
                result = found_infs[0]
            collapse, nonfinite = self._collapse_ahead(found_inf, prepared), grads.nonfinite
            if _is_known_to_skip(found_inf):
                # Gradients kept after a skipped step would make the next step skip, too.
                keep_gradients = False
                nonfinite = nonfinite or self._nonfinite_report.nonfinite_grads(prepared)
            with disable_casts():
                # The post-hook of each optimizer calls end_step(), which publishes its masters and closes its window.
                for one in prepared:
                    self._call_optimizer(
                        one, StepCall(found_inf, by_engine=True, keep_gradients=keep_gradients, fused=fused)
                    )
            self._clear_and_commit(prepared, keep_gradients=keep_gradients)
            self.poll_stuck()
            if collapse is not None:
                raise collapse
        return StepResult(result, self._scale, grads.norm, has_gradients=grads.exist, grads=nonfinite)

    def _fused_of(self, prepared: Sequence[PreparedOptimizer]) -> FusedOptimizer | None:
        """The engine's only optimizer, if fused and free to read gradients from elsewhere than ``.grad``; else None."""
        optimizer = prepared[0].optimizer
        if not isinstance(optimizer, FusedOptimizer) or prepared[0].num_optimizers != 1:
            return None
        if not self.reducer.is_local and any(map(is_rank_local, prepared[0].pairs_to_step().model_params)):
            return None
        return optimizer if self._clips_by_norm and reads_grads_itself(optimizer) else None

    def _grads_for_fused_step(
        self, one: PreparedOptimizer, table: ParamTable, optimizer: FusedOptimizer
    ) -> FusedGrads | None:
        """The pending or unscaled gradients in the form that the fused step reads itself; None if there are none."""
        pending = one.pending_grads(table)
        if pending is not None:
            return FusedGrads.of_pending(*pending, table, optimizer)
        if isinstance(one.window, Unscaled):
            refuse_unseen_backward(one.window, one.window.pairs)
            return FusedGrads.of_unscaled(one.window, table, optimizer)
        return None

    def _decide_on_device(self, one: PreparedOptimizer, fused: FusedGrads) -> StepDecision | None:
        """Decide the step on the device of the gradients; None if the host must take part.

        The host takes part if ranks reduce ``found_inf``, if a loss scale is close to its limit, if several losses were
        scaled, or if gradients were edited: their ``found_inf`` may differ from that of the backward passes.
        """
        window = one.window
        if isinstance(window, Unscaled) and (window.is_edited or not window.snapshot.unchanged()):
            return None
        scaler = self._record.only_scaler
        if scaler is None or one.foreign_losses or not self.reducer.is_local:
            return None
        if self._stuck.value > 0 or self._is_near_limit():
            return None
        decision = fused.decide(
            DecisionInputs(
                scaler.config,
                scaler.state,
                self._record.num_steps,
                self._record.num_skipped,
                self._record.with_nonfinite_loss(scaler, one.found_inf),
                self._max_norm,
            )
        )
        if decision is not None:
            self._record.plan_commit_from_decision(decision)
        return decision

    def _clip_unscaled(self, prepared: Sequence[PreparedOptimizer]) -> ClippedGrads:
        """Check and clip the gradients that the optimizers read in ``.grad``."""
        grads = _each_once([one.note_unseen_grads() for one in prepared])
        found_infs = self.checked_found_infs(prepared)
        if self._config.policy.compute not in (None, torch.float32):
            for one in prepared:
                refuse_only_unseen_backward(one.window, one.pairs_to_step())
        skips = _is_known_to_skip(found_infs[0])
        # Before clipping, which would spread a NaN to all gradients.
        nonfinite = self._nonfinite_report.nonfinite_grads(prepared) if skips else None
        norm = self._clip(grads, prepared)
        # With group= every rank counts as having gradients, so that all ranks count the same steps.
        exist = not self.reducer.is_local or bool(grads)
        return ClippedGrads(_with_infinite_norm(found_infs, norm), norm, exist, nonfinite)

    def _clip_in_fused_step(self, one: PreparedOptimizer, fused: FusedGrads) -> ClippedGrads:
        """Measure the gradients that a fused step reads where they are, and hand it the coefficient that clips them."""
        squares, found_inf = fused.measure()
        one.note_found_inf(found_inf)
        found_infs = self.checked_found_infs([one])
        if self._max_norm is not None and not self.reducer.is_local:
            squares = squares + self.reducer.sum_powers(torch.zeros_like(squares), 2)
        norm, clip_coef = norm_and_coefficient(self._max_norm, squares)
        fused.hand_over(clip_coef)
        return ClippedGrads(_with_infinite_norm(found_infs, norm), norm)

    def _clip(self, grads: list[Tensor], prepared: Sequence[PreparedOptimizer]) -> Tensor | None:
        """Clip ``grads``; return their norm. With ``group=`` it is over all ranks and counts shared gradients once."""
        clip = self._config.clip
        if self.reducer.is_local or not isinstance(clip, ClipNorm):
            return clip(grads)
        local_ids = {
            id(pair.main.grad)
            for one in prepared
            for pair in one.pairs_to_step()
            if is_rank_local(pair.model)
        }
        local = [grad for grad in grads if id(grad) in local_ids]
        shared = [grad for grad in grads if id(grad) not in local_ids]
        of_shared, of_local = (
            foreach.global_norm(part, clip.norm_type).to(self._device) for part in (shared, local)
        )
        over_ranks = self.reducer.sum_powers(of_local, clip.norm_type)
        if clip.norm_type != math.inf:
            over_ranks = over_ranks ** (1 / clip.norm_type)
        norm = torch.linalg.vector_norm(torch.stack([of_shared, over_ranks]), clip.norm_type)
        foreach.scale_(grads, reference.clip_coef(norm, clip.max_norm))
        return norm

    def checked_found_infs(self, prepared: Sequence[PreparedOptimizer]) -> Tensor:
        """``found_inf`` of the step, then of each loss of the window, if the gradients can be stepped.  # f32[1 + losses]

        Raises:
            OrderError: gradients are still scaled, or never reached the masters.
        """
        _refuse_unreduced(prepared)
        for one in prepared:
            refuse_scaled(one.window)
            if not isinstance(one.window, Pending):
                refuse_unseen_backward(one.window, one.pairs_to_step())
        found_infs = self._record.found_infs([one.found_inf for one in prepared])
        if self._is_near_limit():
            self._nonfinite_report.note_nonfinite(prepared if bool(found_infs[0]) else ())
        return found_infs

    def _of_every_loss(self, found_infs: Tensor) -> Tensor:
        """With ``group=``, ``found_infs`` with an entry for every loss of the engine, used on this rank or not."""
        return found_infs if self.reducer.is_local else self._record.of_every_loss(found_infs, self._scalers)

    def _decide(
        self, found_infs: Tensor, prepared: Sequence[PreparedOptimizer], *, has_gradients: bool
    ) -> Tensor | bool:
        """Record the outcome; return whether to skip: a bool, or a tensor if the kernels of all optimizers can skip."""
        found_inf: Tensor | bool = found_infs[0]
        if self._stuck.value > 0 or not all(takes_found_inf(one.optimizer) for one in prepared):
            # In the usual case the only wait of a step; near the limit of a loss scale others follow.
            found_inf = bool(found_infs[0])
        elif (known := host_values(found_inf)) is not None:
            # A bool spares work: a kernel given found_inf counts a skipped step, then takes it back per parameter.
            found_inf = bool(known[0])
        self._record.plan_commit(
            found_infs,
            found_inf,
            _params_of(prepared),
            _foreign_losses(prepared),
            has_gradients=has_gradients,
        )
        return found_inf

    def _collapse_ahead(
        self, found_inf: Tensor | bool, prepared: Sequence[PreparedOptimizer]
    ) -> LossScaleCollapse | None:
        """The error to raise after this step, or None; made before the gradients that it names are dropped."""
        if found_inf is True and self._is_near_limit() and self._record.read_would_collapse():
            return self._nonfinite_report.collapse_error(prepared)
        return None

    def _step_with_closure(self, closure: Closure, prepared: Sequence[PreparedOptimizer]) -> StepResult:
        every = self._config.accumulation.every
        if every != 1 or len(prepared) != 1:
            raise ClosureError(
                f"engine.step(closure) needs accumulate=1 and one optimizer; here accumulate={every} and there are "
                f"{len(prepared)} optimizers"
            )
        (one,) = prepared
        with self._all_or_nothing(prepared):
            found_inf, collapse, nonfinite = self._found_inf_before_closure(one), None, None
            if bool(found_inf):
                found_infs = self._of_every_loss(self._record.found_infs([one.found_inf]))
                self.reducer.all_reduce_(found_infs)
                self._decide(found_infs, prepared, has_gradients=True)
                collapse = self._collapse_ahead(True, prepared)
                nonfinite = self._nonfinite_report.nonfinite_grads(prepared)
            else:
                self._call_optimizer(one, StepCall(found_inf=False, by_engine=True), closure)
            self._clear_and_commit(prepared)
            self.poll_stuck()
            if collapse is not None:
                raise collapse
        return StepResult(found_inf, self._scale, grads=nonfinite)

    def _found_inf_before_closure(self, one: PreparedOptimizer) -> Tensor:
        """``found_inf`` of gradients that the optimizer reads before it calls the closure, as SAM does.  # f32[]"""
        if not isinstance(one.window, Unscaled | Pending):
            return torch.zeros_like(one.found_inf)
        one.unscale_pending()
        found_inf = one.found_inf.clone()
        self.reducer.all_reduce_(found_inf)
        return found_inf

    def _call_optimizer(self, one: PreparedOptimizer, call: StepCall, closure: Closure | None = None) -> None:
        """Call ``optimizer.step``, whose hooks call :meth:`end_step`."""
        one.running, one.ended = call, None
        optimizer = one.optimizer
        try:
            _ = optimizer.step() if closure is None else optimizer.step(closure)
        finally:
            self._finish_or_discard(one)
            if has_later_hooks(optimizer):
                # They may have written masters, and a compiled forward pass does not check for that.
                one.masters.publish_written()

    def _clear_and_commit(
        self, prepared: Sequence[PreparedOptimizer], *, keep_gradients: bool = False
    ) -> None:
        """After every optimizer has stepped (two may share a master), drop the gradients and apply the decision."""
        for one in prepared:
            one.clear_after_step(keep=keep_gradients)
        self._record.commit()

    # Called by the step hooks of an optimizer: in user-called steps, and at the end of every step.

    def begin_user_step(self, one: PreparedOptimizer, call: StepCall, *, has_closure: bool) -> StepCall:
        """``call``, an ``optimizer.step()`` of user code, with the decision whether to skip it. Waits for the device.

        Raises:
            OrderError: the backward pass bypassed halfpeak, gradients are still scaled, or only the engine may step.
        """
        config = self._config
        allowed = config.stepped_by != "engine"
        try:
            refuse_inference_mode("optimizer.step()")
            refuse_user_step(one.window, allowed=allowed, has_closure=has_closure)
            _refuse_unreduced([one])
        except OrderError:
            # No step has begun, so the window keeps the found_inf of its backward passes.
            one.end_running()
            raise
        one.begin_step()
        if isinstance(one.window, Empty) and not has_closure:
            # Inside a window, and before a closure, low-precision parameters may hold gradients of another loss.
            refuse_unseen_backward(one.window, one.pairs_to_step())
        if has_closure or not allowed or is_called_by_params():
            return call._replace(found_inf=False)
        one.check_grads()
        found_infs = self._of_every_loss(self._record.found_infs([one.found_inf]))
        self.reducer.all_reduce_(found_infs)
        skip = bool(found_infs[0])
        self._record.plan_commit(found_infs, skip, _params_of([one]), one.foreign_losses)
        exhausted = skip and (
            self._record.read_would_collapse() or any(scaler.read_exhausted() for scaler in self._scalers)
        )
        collapse = self._nonfinite_report.collapse_error([one]) if exhausted else None
        return call._replace(found_inf=skip, collapse=collapse)

    def wrap_closure(self, one: PreparedOptimizer, closure: Closure) -> Closure:
        """The closure that an optimizer calls instead of the user's."""
        return ScaledClosure(closure, one, accept=self._accept_closure, retry=self._retry_closure)

    def end_step(self, one: PreparedOptimizer) -> None:
        """Publish the masters and close the window; apply the decision of a user-called step. May be called again.

        Raises:
            LossScaleCollapse: a user-called step was skipped, and the loss scale cannot fall any further.
        """
        # A forward pass in a step hook, or the step of a base class, may have ended this step already.
        call = one.running or one.ended or StepCall(found_inf=False)
        one.ended = StepCall(call.found_inf)
        masters, indices = one.masters, one.cached_table().master_indices
        if call.found_inf is True:
            # The step changed nothing, so values that user code wrote into the model stay.
            masters.mark_skipped(indices)
        elif call.fused is not None:
            # The optimizer has written the low parameters itself.
            masters.record_published(indices, moved=one.record_layout())
        else:
            masters.publish(indices, moved=one.record_layout())
        if call.has_closure and one.running is not None:
            # The optimizer has used finite gradients only; see ScaledClosure.
            found_infs = self._record.found_infs([one.found_inf])
            self._record.plan_commit(found_infs, False, _params_of([one]), one.foreign_losses)
        one.close_window(call)
        if not call.by_engine:
            self._record.commit()
            if call.collapse is not None:
                raise call.collapse

    def _accept_closure(self, one: PreparedOptimizer) -> None:
        """Clip a closure's gradients, which are finite and about to be used."""
        self._clip(one.main_grads(), [one])

    def _retry_closure(self, one: PreparedOptimizer) -> None:
        """Lower the scale before a closure runs again because its gradients were not finite.

        Raises:
            LossScaleCollapse: the scale is static, or cannot fall any further.
        """
        found_infs = self._record.found_inf_per_scaler
        for scaler, found_inf in found_infs:
            # Scales without an overflow stay, because no step is taken: two that grew and fell in turn would never end.
            if bool(found_inf):
                scaler.update(found_inf)
        self.poll_stuck()
        self._record.discard_evaluation()
        used = [scaler for scaler, _ in found_infs] or self._scalers
        if not any(scaler.config.dynamic for scaler in used) or any(s.read_exhausted() for s in used):
            raise self._nonfinite_report.collapse_error([one])

    # After exceptions.

    @contextmanager
    def _all_or_nothing(self, prepared: Sequence[PreparedOptimizer]) -> Generator[None]:
        """If the body raises after every optimizer has stepped, the step counts; else the window is dropped."""
        try:
            yield
        except BaseException:
            for one in prepared:
                one.cancel_fused_inputs()
            if all(one.ended is not None for one in prepared):
                for one in prepared:
                    one.drop()
                self._record.commit()
            else:
                self.drop_window(prepared)
            raise

    def recover(self, prepared: Sequence[PreparedOptimizer]) -> None:
        """If a step raised: finish it where the optimizer had changed something already, else discard it."""
        for one in prepared:
            if one.running is not None:
                self._finish_or_discard(one)
                if one.ended is None:
                    self._record.discard()
        self._record.commit()

    def finish_if_mutated(self, one: PreparedOptimizer) -> None:
        """Finish a step that changed anything, but discard none: a step hook of user code may run a forward pass."""
        if one.running is not None and (one.ended is not None or one.has_mutated()):
            self.end_step(one)

    def _finish_or_discard(self, one: PreparedOptimizer) -> None:
        self.finish_if_mutated(one)
        if one.running is not None and one.running.progress is not None:
            # The optimizer has changed nothing.
            one.masters.mark_skipped(one.cached_table().master_indices)
        one.end_running()

    def abort(self, prepared: Sequence[PreparedOptimizer]) -> None:
        """Recover from an exception and drop the window; see :meth:`halfpeak.Engine.abort`."""
        self.recover(prepared)
        self.drop_window(prepared)

    def drop_window(self, prepared: Sequence[PreparedOptimizer]) -> None:
        """Drop all gradients and begin the window again, because part of a window must not be stepped as a whole."""
        self._record.discard()
        self._record.restart_window(self._config.accumulation.every)
        self._unmanaged.abort()
        for one in prepared:
            one.drop()

    # Loss scales that cannot fall any further.

    def poll_stuck(self) -> None:
        """Start reading how many overflows in a row could not lower a loss scale."""
        counts = [scaler.state.stuck for scaler in self._scalers]
        self._stuck.push(counts[0] if len(counts) == 1 else torch.stack(counts).max())

    def sync_stuck(self) -> None:
        """:meth:`poll_stuck`, and wait for the value.

        Raises:
            OrderError: a loss scale is stuck or near its limit, so the host takes part in the next step.
        """
        for _ in range(2):
            # The first push is ignored if an earlier copy is still on its way.
            torch.accelerator.synchronize(self._device)
            self.poll_stuck()
        torch.accelerator.synchronize(self._device)
        if self._stuck.value > 0 or self._is_near_limit():
            raise OrderError(
                "the loss scale cannot fall and the last gradients were not finite; call engine.step() without the captured "
                "graph until a step is not skipped"
            )

    def check_after_replay(self, prepared: Sequence[PreparedOptimizer]) -> None:
        """After the replay of a CUDA graph, raise LossScaleCollapse if the patience of a loss scale is exhausted."""
        self.poll_stuck()
        if self._stuck.value >= self._patience:
            raise self._nonfinite_report.collapse_error(prepared)

    def _is_near_limit(self) -> bool:
        """Whether one more overflow could exhaust a loss scale's patience, judged by the last value that was read."""
        return self._stuck.value + 1 >= self._patience

    @property
    def _scale(self) -> Tensor:
        """The scale of loss 0.  # f32[]"""
        return self._scalers[0].state.scale


def _each_once(lists: Sequence[list[Tensor]]) -> list[Tensor]:
    """The gradients of all optimizers, each once: one that two optimizers share would count twice in the norm."""
    return (
        lists[0] if len(lists) == 1 else list({id(grad): grad for grads in lists for grad in grads}.values())
    )


def _params_of(prepared: Sequence[PreparedOptimizer]) -> Iterator[Tensor] | None:
    """The parameters of the optimizers of a step; None if these are all optimizers of their engine."""
    if len(prepared) == prepared[0].num_optimizers:
        return None
    return (parameter for one in prepared for parameter in one.cached_table().model_params)


def _foreign_losses(prepared: Sequence[PreparedOptimizer]) -> list[ForeignLoss]:
    return [loss for one in prepared for loss in one.foreign_losses]


def _refuse_unreduced(prepared: Sequence[PreparedOptimizer]) -> None:
    """Refuse to step gradients that a loss for another optimizer has left on each rank for itself, as under no_sync.

    Raises:
        OrderError: there are some, and ``zero_grad()`` has not dropped them.
    """
    if not all(loss.is_reduced for loss in _foreign_losses(prepared)):
        raise OrderError(
            "a loss for another optimizer has left gradients in these parameters that are not reduced over the ranks "
            "(no_sync), so the ranks would part; freeze the parameters for that loss, or call zero_grad() after it"
        )


def _is_known_to_skip(found_inf: Tensor | bool) -> bool:
    """Whether the host knows, without waiting for the device, that a step is skipped."""
    if isinstance(found_inf, bool):
        return found_inf
    return any(host_values(found_inf) or ())


def _with_infinite_norm(found_infs: Tensor, norm: Tensor | None) -> Tensor:
    """``found_infs``; if the gradients are finite but their total norm is not, 1 for the step and for all losses."""
    if norm is None or ((known := host_values(norm)) is not None and math.isfinite(known[0])):
        return found_infs
    infinite = (~torch.isfinite(norm)).to(found_infs)
    return torch.maximum(found_infs, infinite * (1 - found_infs[0]))
