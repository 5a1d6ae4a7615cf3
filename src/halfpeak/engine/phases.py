"""The phases of a mixed-precision step, in order, written once. Every door enters here."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from halfpeak.casting.suspend import disable_casts
from halfpeak.core.errors import ClosureError, OrderError
from halfpeak.core.host import is_on_host, read_host
from halfpeak.core.outcome import StepResult
from halfpeak.engine.block import Block
from halfpeak.engine.bypass import require_taken_in
from halfpeak.engine.deferred import Deferred
from halfpeak.engine.fused import takes_found_inf
from halfpeak.engine.journal import Journal
from halfpeak.engine.lane import Lane
from halfpeak.engine.plan import Plan
from halfpeak.engine.release import Release
from halfpeak.engine.served import can_serve, coefficient, fits, serve_taken
from halfpeak.engine.slots import Phase
from halfpeak.engine.steward import Steward
from halfpeak.engine.strays import Strays
from halfpeak.fused.books import Account, Books
from halfpeak.parts.clip import limit_of_norm
from halfpeak.parts.lagged import Lagged
from halfpeak.parts.loss_scaler import LossScaler, scale_loss
from halfpeak.parts.verdict import Verdict


class Phases:
    """The order of a step.

    ::

        block   set gradients aside; scale the loss; (backward); per parameter
                master.grad (float32) += model.grad / scale, and found_inf
        step    clip, one verdict for all ranks, then commit:
                  found_inf 0: optimizer.step(), masters rounded into the model
                  found_inf 1: nothing moves; batch-norm statistics are put back
                and the loss scale moves

    Both are transactions: an exception leaves a block not begun, and a step either taken or not begun.
    """

    def __init__(
        self,
        plan: Plan,
        journal: Journal,
        steward: Steward,
        scalers: Sequence[LossScaler],
        verdict: Verdict,
        strays: Strays,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._journal = journal
        self._steward = steward
        self._scalers = scalers
        self.verdict = verdict
        self.strays = strays
        self.release = Release(on=plan.release_gradients)
        self._trouble = Lagged(device)
        self._device = device

    @contextmanager
    def block(
        self,
        loss: Tensor,
        scaler: LossScaler,
        lanes: Sequence[Lane],
        *,
        delay: bool,
        report: Callable[[LossScaler, Tensor], None] | None,
    ) -> Generator[Tensor]:
        """One backward pass; see :meth:`halfpeak.Engine.scaled`."""
        self.recover(lanes)
        block = Block(lanes)
        try:
            block.open()
            scale = block.scale_of(scaler)
            block.begin()
            self.strays.open()
            defers = report is None and fits(self._plan.clip) and can_serve(lanes)
            ends = self._plan.accumulation.is_boundary(self._journal.index)
            # Gradients that stay scaled are for autograd to add to; those of a window of one pass, for the step to read.
            stays = delay or block.adds_to_scaled or (defers and ends and block.begins_window)
            with self.release.during(None if stays else block, scale) as has_taken:
                yield scale_loss(loss, scale)
            if delay:
                block.delay(scaler, scale)
                return
            self.strays.absorb(scale)
            if defers and not has_taken and block.is_first:
                lanes[0].defer(Deferred(lanes[0], block, scaler, scale))
                self._journal.note(scaler, block.found_inf)
            else:
                block.absorb(scale)
                (report or self._journal.note)(scaler, block.found_inf)
        except BaseException:
            if not block.can_be_undone:
                self.drop_window(lanes)
            else:
                block.put_back()
                if block.has_begun:
                    self.strays.put_back()
            raise

    def step(
        self, lanes: Sequence[Lane], closure: Callable[[], Any] | None = None, *, keep_gradients: bool = False
    ) -> StepResult:
        """End a backward pass, and a window where it is due; see :meth:`halfpeak.Engine.step`."""
        self._journal.settle()
        for lane in lanes:
            lane.has_stepped = False
        if closure is not None:
            return self._step_with_closure(closure, lanes)
        if not self._plan.accumulation.is_boundary(self._journal.index):
            self._journal.index += 1
            return StepResult(torch.zeros_like(lanes[0].found_inf), self._scale, None, boundary=False)
        try:
            serve_taken(lanes, self._plan.clip)
            squares = lanes[0].measure(self._books(lanes[0])) if len(lanes) == 1 else None
            if isinstance(squares, Account):
                return self._commit_account(squares, lanes[0], keep_gradients=keep_gradients)
            verdicts = self.unscale(lanes)
            norm = self.clip(lanes, verdicts) if squares is None else self.serve(lanes[0], squares, verdicts)
            self.verdict.agree_(verdicts)
            self.commit(verdicts, lanes, keep_gradients=keep_gradients)
        except BaseException:
            self._leave(lanes)
            raise
        return StepResult(verdicts[0], self._scale, norm)

    def unscale(self, lanes: Sequence[Lane]) -> Tensor:
        """All gradients of the window are true-sized now; whether any was not finite, over all and per loss used.

        Returns:
            The verdict of the step, then of each loss.  # f32[1 + losses]
        """
        for lane in lanes:
            if lane.phase is Phase.SCALED:
                raise OrderError(
                    "the window ends on a backward pass that was not synchronised, so its gradients are still scaled; "
                    "pass the wrapped module in every iteration: engine.forward(wrapped)"
                )
            if lane.phase is not Phase.DEFERRED:
                require_taken_in(lane)
        verdicts = self._journal.verdicts([lane.found_inf for lane in lanes])
        if self._is_near_collapse():
            self._steward.look(lanes if bool(verdicts[0]) else ())
        return verdicts

    def clip(self, lanes: Sequence[Lane], verdicts: Tensor) -> Tensor | None:
        """Clip what the optimizers will read; returns its norm before that. An infinite norm is a verdict too."""
        grads = lanes[0].targets()
        if len(lanes) > 1:
            # Each once: a parameter of two optimizers would count twice in the norm and be scaled twice.
            grads = list({id(grad): grad for lane in lanes for grad in lane.targets()}.values())
        norm = self._plan.clip(grads)
        if norm is not None:
            _find_infinite(norm, verdicts)
        return norm

    def serve(self, lane: Lane, squares: Tensor, verdicts: Tensor) -> Tensor | None:
        """:meth:`clip` for gradients that a fused optimizer multiplies itself: tell it by what."""
        norm, factor = coefficient(self._plan.clip, squares)
        if norm is not None:
            _find_infinite(norm, verdicts)
        lane.serve(factor)
        return norm

    def commit(self, verdicts: Tensor, lanes: Sequence[Lane], *, keep_gradients: bool = False) -> None:
        """Step or skip the optimizers, then move scales, counters and batch-norm statistics."""
        verdict: Tensor | bool = verdicts[0]
        if self._trouble.value > 0 or not all(takes_found_inf(lane.optimizer) for lane in lanes):
            # The one place where a step waits for the device.
            verdict = bool(verdicts[0])
        elif is_on_host(verdict):
            # A kernel that is given found_inf counts its step and takes that back, parameter by parameter.
            verdict = bool(read_host(verdict))
        self._journal.begin(verdicts, verdict, Lane.parameters_of(lanes))
        collapse = None
        if verdict is True and self._is_near_collapse() and self._journal.read_collapse():
            collapse = self._steward.collapse(lanes)
        with disable_casts():
            for lane in lanes:
                lane.step(verdict, keep=keep_gradients)
        self._close(lanes, keep_gradients=keep_gradients)
        if collapse is not None:
            raise collapse

    def _books(self, lane: Lane) -> Books | None:
        """The books of a step that can be decided where the gradients are; None where the host has a say in it.

        It has where ranks must agree, where a loss scale is in trouble, and where several losses were scaled.
        """
        noted = self._journal.noted
        if len(noted) != 1 or not self.verdict.local or self._trouble.value > 0 or self._is_near_collapse():
            return None
        scaler = noted[0][0]
        journal, limit = self._journal, limit_of_norm(self._plan.clip)
        return Books(scaler.config, scaler.state, journal.taken, journal.skipped, lane.found_inf, limit)

    def _commit_account(self, account: Account, lane: Lane, *, keep_gradients: bool) -> StepResult:
        """:meth:`commit` where everything has been decided on the device."""
        self._journal.begin_accounted(account)
        with disable_casts():
            lane.step(account.found_inf, keep=keep_gradients)
        self._close([lane], keep_gradients=keep_gradients, stuck=account.stuck)
        norm = None if limit_of_norm(self._plan.clip) is None else account.norm
        return StepResult(account.found_inf, self._scale, norm)

    def recover(self, lanes: Sequence[Lane]) -> None:
        """A step of the caller's that raised: it counts if the optimizer had moved by then; else it did not happen."""
        for lane in lanes:
            if lane.is_stepping:
                lane.recover()
                if not lane.has_stepped:
                    self._journal.cancel()
        self._journal.settle()

    def catch_up(self, lanes: Sequence[Lane]) -> None:
        """Before a forward pass: what a step decided and an exception kept from happening happens now."""
        for lane in lanes:
            lane.catch_up()
        if not any(lane.is_stepping for lane in lanes):
            self._journal.settle()

    def abort(self, lanes: Sequence[Lane]) -> None:
        """After an exception from anywhere; see :meth:`halfpeak.Engine.abort`."""
        self.recover(lanes)
        self.drop_window(lanes)

    def drop_window(self, lanes: Sequence[Lane]) -> None:
        """Without its gradients a window begins anew: half of one must not be stepped as a whole."""
        self._journal.cancel()
        self._journal.rewind(self._plan.accumulation.every)
        self.strays.put_back()
        for lane in lanes:
            lane.drop()

    def _step_with_closure(self, closure: Callable[[], Any], lanes: Sequence[Lane]) -> StepResult:
        if self._plan.accumulation.every != 1 or len(lanes) != 1:
            raise ClosureError(
                f"a closure evaluates one whole step of one optimizer; accumulate={self._plan.accumulation.every} and "
                f"{len(lanes)} optimizers cannot be combined with it"
            )
        lane = lanes[0]
        try:
            lane.step(False, closure)
            self._journal.begin(self.unscale(lanes), False, Lane.parameters_of(lanes))
        except BaseException:
            self._leave(lanes)
            raise
        self._close(lanes)
        return StepResult(torch.zeros_like(lane.found_inf), self._scale)

    def _close(
        self, lanes: Sequence[Lane], *, keep_gradients: bool = False, stuck: Tensor | None = None
    ) -> None:
        for lane in lanes:
            lane.end(keep=keep_gradients)
        self._journal.settle()
        self.look_for_trouble(stuck)

    def _leave(self, lanes: Sequence[Lane]) -> None:
        """After an exception in a step: if every optimizer had moved, the step counts; else the window is dropped."""
        if all(lane.has_stepped for lane in lanes):
            for lane in lanes:
                lane.drop()
            self._journal.settle()
        else:
            self.drop_window(lanes)

    def look_for_trouble(self, stuck: Tensor | None = None) -> None:
        """Start reading how many overflows in a row could not lower a loss scale: ``stuck``, where that is known."""
        if stuck is None:
            counts = [scaler.state.stuck for scaler in self._scalers]
            stuck = counts[0] if len(counts) == 1 else torch.stack(counts).max()
        self._trouble.push(stuck)

    def settle_trouble(self) -> None:
        """:meth:`look_for_trouble`, and wait for what is seen.

        Raises:
            OrderError: a loss scale is in trouble, and the host has a say in its next step.
        """
        for _ in range(2):
            # The first may find an earlier reading on its way.
            torch.accelerator.synchronize(self._device)
            self.look_for_trouble()
        torch.accelerator.synchronize(self._device)
        if self._trouble.value > 0 or self._is_near_collapse():
            raise OrderError(
                "the loss scale cannot fall and the last gradients were not finite; take ordinary steps until one is clean"
            )

    def look_after_replay(self, lanes: Sequence[Lane]) -> None:
        """After a step that the host took no part in: raise LossScaleCollapse where patience is exhausted."""
        self.look_for_trouble()
        limits = [scaler.config.patience for scaler in self._scalers if scaler.config.patience is not None]
        if limits and self._trouble.value >= min(limits):
            raise self._steward.collapse(lanes)

    def _is_near_collapse(self) -> bool:
        """Whether one more overflow could exhaust a loss scale's patience, by what has been read already."""
        limits = [scaler.config.patience for scaler in self._scalers if scaler.config.patience is not None]
        return bool(limits) and self._trouble.value + 1 >= min(limits)

    @property
    def _scale(self) -> Tensor:
        """The scale of loss 0.  # f32[]"""
        return self._scalers[0].state.scale


def _find_infinite(norm: Tensor, verdicts: Tensor) -> None:
    """An infinite norm is a verdict for every loss."""
    if not is_on_host(norm):
        verdicts.copy_(torch.maximum(verdicts, (~torch.isfinite(norm)).to(verdicts)))
    elif not math.isfinite(read_host(norm)):
        verdicts.fill_(1.0)
