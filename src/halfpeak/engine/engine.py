"""The engine: the phases of a mixed-precision step, in order, written once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.accumulation import Accumulation
from halfpeak.core.errors import ClosureError, LossIdError, LossScaleCollapse, OrderError
from halfpeak.core.levels import Properties
from halfpeak.core.outcome import StepResult
from halfpeak.core.policy import Policy
from halfpeak.core.schedule import ScaleConfig
from halfpeak.engine.block import Block
from halfpeak.engine.journal import Journal
from halfpeak.engine.lane import Lane, Phase
from halfpeak.engine.names import ParameterNames
from halfpeak.engine.sync import synchronising
from halfpeak.parts.buffers import BatchNormBuffers
from halfpeak.parts.clip import Clip
from halfpeak.parts.lagged import Lagged
from halfpeak.parts.loss_scaler import LossScaler
from halfpeak.parts.masters import Masters
from halfpeak.parts.verdict import Verdict


class Engine:
    """Takes mixed-precision steps. Made by :func:`halfpeak.prepare`.

    ::

        forward    casts on; gradient synchronisation as the accumulation says
        backward   divide for accumulation, scale, backward, then per parameter
                   master.grad (float32) += model.grad / scale, and found_inf
        step       clip, one verdict for all ranks, then commit:
                     found_inf 0: optimizer.step(), masters rounded into the model
                     found_inf 1: nothing moves; batch-norm statistics are put back
                   and the loss scale moves

    Nothing waits for the device but ``step``, once, to learn whether to skip; and not even that with an optimizer that
    takes ``found_inf`` itself (``torch.optim.AdamW(fused=True)`` and its like).

    Attributes:
        models: the prepared models.
        properties: what the opt level and its overrides came to.
        policy: in which dtype each thing is stored, computed and returned.
        casting: the re-entrant scope in which operations are cast (O1, O4); elsewhere a null context.
        scalers: one loss scaler per loss.
        accumulation: how many backward passes make a step.
    """

    def __init__(
        self,
        *,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        properties: Properties,
        policy: Policy,
        masters: Masters,
        scale: ScaleConfig,
        num_losses: int,
        accumulation: Accumulation,
        clip: Clip,
        casting: AbstractContextManager[Any],
        verdict: Verdict,
        buffers: BatchNormBuffers,
        device: torch.device,
        handles: Iterable[Any],
        steps_itself: bool,
    ) -> None:
        self.models = tuple(models)
        self.properties = properties
        self.policy = policy
        self.accumulation = accumulation
        self.scalers = [LossScaler(scale, device) for _ in range(num_losses)]
        self.masters = masters
        self.casting = casting
        self.steps_itself = steps_itself
        self.device = device
        self.buffers = buffers
        self.journal = Journal(buffers, device)
        self.names = ParameterNames(self.models)
        self.lanes = [Lane(optimizer, masters, self, device) for optimizer in optimizers]
        # An engine that steps by itself may be the only one to hold its optimizers.
        self._kept = tuple(optimizers) if steps_itself else ()
        self._clip = clip
        self._verdict = verdict
        self._handles = list(handles)
        self._synchronised = True
        self._trouble = Lagged(device)
        buffers.save()

    @property
    def model(self) -> nn.Module:
        """The model, where there is exactly one.

        Raises:
            OrderError: there are several; use :attr:`models`.
        """
        if len(self.models) != 1:
            raise OrderError(f"this engine has {len(self.models)} models; write engine.models[i]")
        return self.models[0]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in the order they were prepared."""
        return [lane.optimizer for lane in self.lanes]

    @property
    def index(self) -> int:
        """Completed calls of :meth:`step`, counted since the beginning of the run."""
        return self.journal.index

    @property
    def taken(self) -> Tensor:
        """Steps in which the optimizers moved.  # i32[]"""
        return self.journal.taken

    @property
    def skipped(self) -> Tensor:
        """Steps that were skipped because a gradient was not finite.  # i32[]"""
        return self.journal.skipped

    def read_scale(self, loss_id: int = 0) -> float:
        """The loss scale as a number. Waits for the device."""
        return self.scalers[loss_id].read_scale()

    @contextmanager
    def forward(self, wrapped: nn.Module | None = None) -> Generator[None]:
        """The forward pass and the loss: casts on, and no gradient synchronisation where accumulation makes it useless.

        Args:
            wrapped: the ``DistributedDataParallel`` (or FSDP2) module around the model, if there is one. Inside a
                window its gradients stay local and scaled until the last backward pass.
        """
        with ExitStack() as stack:
            stack.enter_context(self.casting)
            self._synchronised = wrapped is None or self.accumulation.is_boundary(self.index)
            if wrapped is not None:
                stack.enter_context(synchronising(wrapped, self._synchronised))
            yield

    def backward(
        self,
        loss: Tensor,
        *,
        loss_id: int = 0,
        optimizers: Iterable[Optimizer] | Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Scale the loss, run backward, and take the gradients in, true-sized.

        Args:
            loss: a scalar. With accumulation it is divided by the length of its window.
            loss_id: which loss scaler it uses.
            optimizers: those whose parameters get gradients here; None means all.
            kwargs: passed to ``Tensor.backward``, such as ``retain_graph=True``.
        """
        divisor = self.accumulation.divisor(self.index)
        if divisor != 1:
            loss = loss / divisor
        lanes = self.lanes_of(optimizers)
        # Recomputation in the backward pass (activation checkpointing) must be cast as the forward pass was.
        with (
            self.casting,
            self.scaled(loss, lanes=lanes, loss_id=loss_id, delay=not self._synchronised) as scaled,
        ):
            scaled.backward(**kwargs)

    @contextmanager
    def scaled(
        self, loss: Tensor, *, lanes: Sequence[Lane], loss_id: int = 0, delay: bool = False, note: bool = True
    ) -> Generator[Tensor]:
        """The loss times its scale, for a backward pass in the body; afterwards its gradients are taken in.

        If the body raises, gradients and state are as they were before it.

        Args:
            loss: any shape.
            lanes: the optimizers whose parameters get gradients in the body.
            loss_id: which loss scaler is used.
            delay: leave the gradients scaled for a later block.
            note: hand ``found_inf`` to the loss scaler with the next step.
        """
        if any(lane.verdict is not None for lane in lanes):
            # The caller's optimizer.step() raised half way: what it was to bring about did not happen.
            self.journal.cancel()
        self.journal.settle()
        scaler = self.scaler(loss_id)
        block = Block(lanes)
        try:
            block.open()
            yield scaler.scale(loss)
        except BaseException:
            block.put_back()
            raise
        try:
            if delay:
                block.delay()
            else:
                block.absorb(scaler.inverse())
                if note:
                    self.journal.note(scaler, block.found_inf)
        except BaseException:
            self.journal.cancel()
            block.drop()
            raise

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        optimizers: Iterable[Optimizer] | Optimizer | None = None,
    ) -> StepResult:
        """End a backward pass; at the end of an accumulation window clip, step or skip, and move the loss scale.

        Gradients are dropped afterwards. Waits for the device once, or never with an optimizer that takes
        ``found_inf``.

        Args:
            closure: for optimizers such as LBFGS; it runs ``engine.backward(loss)`` and returns the loss.
            optimizers: those to step; None means all.

        Raises:
            OrderError: the last backward pass was not synchronised, so its gradients are still scaled.
            LossScaleCollapse: gradients stay non-finite and the scale cannot fall any more. The model is unchanged.
        """
        self.journal.settle()
        lanes = self.lanes_of(optimizers)
        for lane in lanes:
            lane.has_stepped = False
        if closure is not None:
            return self._step_with_closure(closure, lanes)
        if not self.accumulation.is_boundary(self.index):
            self.journal.index += 1
            return StepResult(torch.zeros_like(lanes[0].found_inf), self.scale, None, boundary=False)
        try:
            verdicts = self.unscale(lanes)
            norm = self.clip(lanes, verdicts)
            self._verdict.agree_(verdicts)
            self.commit(verdicts, lanes)
        except BaseException:
            self._leave(lanes)
            raise
        return StepResult(verdicts[0], self.scale, norm)

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
        return self.journal.verdicts([lane.found_inf for lane in lanes])

    def clip(self, lanes: Sequence[Lane], verdicts: Tensor) -> Tensor | None:
        """Clip what the optimizers will read; returns its norm before that. An infinite norm is a verdict too."""
        norm = self._clip([grad for lane in lanes for grad in lane.targets()])
        if norm is not None:
            verdicts.copy_(torch.maximum(verdicts, (~torch.isfinite(norm)).to(verdicts)))
        return norm

    def commit(self, verdicts: Tensor, lanes: Sequence[Lane]) -> None:
        """Step or skip the optimizers, then move scales, counters and batch-norm statistics."""
        verdict: Tensor | bool = verdicts[0]
        if self._trouble.value > 0 or not all(lane.takes_found_inf() for lane in lanes):
            # The one place where a step waits for the device.
            verdict = bool(verdicts[0])
        self.journal.begin(verdicts, verdict)
        collapse = self._foresee_collapse(lanes) if verdict is True else None
        for lane in lanes:
            lane.step(verdict)
        self._close(lanes)
        if collapse is not None:
            raise collapse

    def abort(self, optimizers: Iterable[Optimizer] | Optimizer | None = None) -> None:
        """Drop the open window: its gradients and its verdict. Scale and counters stay."""
        self.journal.cancel()
        for lane in self.lanes_of(optimizers):
            lane.drop()

    def remove(self) -> None:
        """Take every hook off models and optimizers and give the optimizers the models' own parameters back.

        Models keep the dtypes they were converted to.
        """
        for handle in self._handles:
            handle.remove()
        for lane in self.lanes:
            lane.detach()
        self._handles.clear()

    @property
    def scale(self) -> Tensor:
        """The scale of loss 0.  # f32[]"""
        return self.scalers[0].state.scale

    def scaler(self, loss_id: int) -> LossScaler:
        """The loss scaler with that number; negative numbers count from the end.

        Raises:
            LossIdError: there is none.
        """
        if not -len(self.scalers) <= loss_id < len(self.scalers):
            raise LossIdError(
                f"loss_id={loss_id!r} with num_losses={len(self.scalers)}; write a loss_id below num_losses, or "
                f"prepare with num_losses={loss_id + 1 if loss_id >= 0 else -loss_id}"
            )
        return self.scalers[loss_id]

    def lanes_of(self, optimizers: Iterable[Optimizer] | Optimizer | None) -> list[Lane]:
        """The lanes of the given optimizers; None means all.

        Raises:
            OrderError: one of them was not prepared by this engine.
        """
        if optimizers is None:
            return self.lanes
        wanted = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        known = {id(lane.optimizer): lane for lane in self.lanes}
        for optimizer in wanted:
            if id(optimizer) not in known:
                raise OrderError(
                    f"{type(optimizer).__name__} was not prepared by this engine; pass it to halfpeak.prepare"
                )
        return [known[id(optimizer)] for optimizer in wanted]

    def decide(self, lane: Lane) -> Tensor | bool:
        """The verdict for a step that the caller began with ``optimizer.step()``."""
        verdicts = lane.found_inf.reshape(1)
        self._verdict.agree_(verdicts)
        verdict = bool(verdicts[0])
        self.journal.begin(verdicts, verdict)
        return verdict

    def finished(self, lane: Lane, verdict: Tensor | bool) -> None:
        """The caller's step is over."""
        if not self.steps_itself:
            self.journal.settle()

    def closure_failed(self, lane: Lane) -> None:
        """Lower the scale and let the closure run again."""
        noted = self.journal.noted
        for scaler, found_inf in noted:
            scaler.update(found_inf)
        self.journal.cancel()
        used = [scaler for scaler, _ in noted] or self.scalers
        if not any(scaler.config.dynamic for scaler in used) or any(
            scaler.read_exhausted() for scaler in used
        ):
            raise self._collapse([lane])

    def closure_passed(self, lane: Lane) -> None:
        """Clip the gradients of a closure."""
        self._clip(lane.targets())

    def _step_with_closure(self, closure: Callable[[], Any], lanes: Sequence[Lane]) -> StepResult:
        if self.accumulation.every != 1 or len(lanes) != 1:
            raise ClosureError(
                f"a closure evaluates one whole step of one optimizer; accumulate={self.accumulation.every} and "
                f"{len(lanes)} optimizers cannot be combined with it"
            )
        lane = lanes[0]
        try:
            lane.step(False, closure)
            self.journal.begin(self.unscale(lanes), False)
        except BaseException:
            self._leave(lanes)
            raise
        self._close(lanes)
        return StepResult(torch.zeros_like(lane.found_inf), self.scale)

    def _close(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.drop()
        self.journal.settle()
        self._trouble.push(torch.stack([scaler.state.stuck for scaler in self.scalers]).max())

    def _leave(self, lanes: Sequence[Lane]) -> None:
        """After an exception in a step: if every optimizer had moved, the step counts; else the window is dropped."""
        if not all(lane.has_stepped for lane in lanes):
            self.journal.cancel()
        for lane in lanes:
            lane.drop()
        self.journal.settle()

    def _foresee_collapse(self, lanes: Sequence[Lane]) -> LossScaleCollapse | None:
        return self._collapse(lanes) if self.journal.read_collapse() else None

    def _collapse(self, lanes: Sequence[Lane]) -> LossScaleCollapse:
        names = self.names.nonfinite(lanes)
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return LossScaleCollapse(
            f"gradients stay non-finite at a loss scale of {self.read_scale():g}, which cannot fall any further. "
            f"Not finite: {shown or 'no parameter of this step'}. Lower the learning rate, clip, keep these layers in "
            "float32, or use bfloat16 (O4, O5)",
            names,
        )
