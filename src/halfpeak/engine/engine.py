"""The engine: what a user holds. The order of a step is in :mod:`halfpeak.engine.phases`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.entry import casts_on
from halfpeak.casting.opcasts import OpCasts
from halfpeak.core.errors import OrderError
from halfpeak.core.outcome import StepResult
from halfpeak.core.tracing import traced_inline, untraced
from halfpeak.engine.block import spared
from halfpeak.engine.copying import copy_engine
from halfpeak.engine.graphs import Graphs
from halfpeak.engine.hooks import hook_forward, hook_loads, hook_steps
from halfpeak.engine.journal import Journal
from halfpeak.engine.lane import Lane
from halfpeak.engine.lookup import find_lanes, find_scaler
from halfpeak.engine.memory import Memory, measure
from halfpeak.engine.names import ParameterNames
from halfpeak.engine.phases import Phases
from halfpeak.engine.plan import Plan
from halfpeak.engine.state import put_state, take_state
from halfpeak.engine.steward import Steward
from halfpeak.engine.strays import Strays
from halfpeak.parts.buffers import BatchNormBuffers
from halfpeak.parts.loss_scaler import LossScaler
from halfpeak.parts.masters import Masters
from halfpeak.parts.verdict import Verdict


class Engine(Graphs):
    """Takes mixed-precision steps. Made by :func:`halfpeak.prepare`.

    ::

        forward    casts on; gradient synchronisation as the accumulation says
        backward   divide for accumulation, scale, backward, unscale into float32
        step       clip, then step or skip, and move the loss scale

    Nothing waits for the device but ``step``, once, to learn whether to skip; and not even that with an optimizer that
    takes ``found_inf`` itself (``torch.optim.AdamW(fused=True)`` and its like).

    Attributes:
        plan: what the run was asked to do.
        models: the prepared models.
        masters: the float32 copies that the optimizers step.
        casting: the re-entrant scope in which operations are cast (O1, O4); elsewhere a null context.
        scalers: one loss scaler per loss.
        lanes: one per optimizer.
        phases: the order of a step.
        handles: of the hooks on the models.
    """

    def __init__(
        self,
        plan: Plan,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        masters: Masters,
        casting: AbstractContextManager[Any],
        verdict: Verdict,
        device: torch.device,
        handles: Iterable[RemovableHandle],
    ) -> None:
        self.plan = plan
        self.models = tuple(models)
        self.masters = masters
        self.casting = casting
        # torch.autocast is for the forward pass alone: it would cast in the formulas of derivatives.
        self._recasting = casting if isinstance(casting, OpCasts) else nullcontext()
        self.device = device
        self.scalers = [LossScaler(plan.scale, device) for _ in range(plan.num_losses)]
        self.buffers = BatchNormBuffers(models if plan.restore_buffers else ())
        self.buffers.save()
        self.journal = Journal(self.buffers, device)
        self.names = ParameterNames(self.models)
        steward = Steward(plan, self.journal, self.scalers, verdict, self.names)
        self.lanes = [Lane(o, masters, steward, device, count=len(optimizers)) for o in optimizers]
        strays = Strays(models, self.lanes)
        self.phases = Phases(plan, self.journal, steward, self.scalers, verdict, strays, device)
        # An engine that steps by itself may be the only one to hold its optimizers.
        self._kept = tuple(optimizers) if plan.steps_itself else ()
        self.handles = [
            *handles,
            *(hook_forward(model, self) for model in models),
            *(handle for model in models for handle in hook_loads(model, self)),
            *(handle for optimizer in optimizers for handle in hook_steps(optimizer, casting)),
        ]
        self._synchronised = True

    def watch(self, model: nn.Module) -> None:
        """Look after the batch-norm statistics of a model that was not prepared, and know its parameters' names."""
        if all(known is not model for known in self.models):
            self.models = (*self.models, model)
            self.names.watch(model)
            self.phases.strays.watch(model)
            if self.plan.restore_buffers:
                self.buffers.watch(model)
                self.handles += hook_loads(model, self)

    @contextmanager
    def forward(self, wrapped: nn.Module | None = None) -> Generator[None]:
        """The forward pass and the loss: casts on, and no gradient synchronisation where accumulation makes it useless.

        Inside a function that :func:`torch.compile` traces, nobody looks for batch-norm statistics that were written since
        the last step; enter it outside of that function where something else writes them.

        Args:
            wrapped: the ``DistributedDataParallel`` (or FSDP2) module around the model, if there is one. Inside a
                window its gradients stay local and scaled until the last backward pass.
        """
        with ExitStack() as stack:
            if not is_dynamo_compiling():
                self.buffers.begin()
            stack.enter_context(casts_on(self.casting if self.policy.per_op else None))
            self._synchronised = wrapped is None or self.plan.accumulation.is_boundary(self.index)
            if wrapped is not None:
                stack.enter_context(self.phases.release.synchronising(wrapped, self._synchronised))
            yield

    @traced_inline
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
            optimizers: those whose parameters get gradients here; None means all. The others keep the gradients they
                have, whatever the loss depends on.
            kwargs: passed to ``Tensor.backward``, such as ``retain_graph=True``.
        """
        if is_dynamo_compiling() and self.whole is not None:
            self.whole.backward(loss, loss_id, optimizers, kwargs)
        else:
            self._run_backward(loss, loss_id, optimizers, kwargs)

    @untraced
    def _run_backward(
        self, loss: Tensor, loss_id: int, optimizers: Iterable[Optimizer] | Optimizer | None, kwargs: Any
    ) -> None:
        divisor = self.plan.accumulation.divisor(self.index)
        if divisor != 1:
            loss = loss / divisor
        lanes = self.lanes_of(optimizers)
        # Recomputation in the backward pass (activation checkpointing) must be cast as the forward pass was.
        with (
            casts_on(self._recasting),
            spared([lane for lane in self.lanes if lane not in lanes], lanes),
            self.scaled(loss, lanes=lanes, loss_id=loss_id, delay=self.delays_unscaling()) as scaled,
        ):
            scaled.backward(**kwargs)

    def delays_unscaling(self) -> bool:
        """Whether gradients of the coming backward pass stay scaled for a later one of the window to take in.

        They must where they are not reduced over the ranks yet. They can where the weights are float32 and one scale holds
        for the whole window: then autograd adds to what lies there, and nothing is set aside, divided and added up.
        """
        inside = not self.plan.accumulation.is_boundary(self.index)
        whole = self.policy.param in (None, torch.float32) and not self.masters.sum_apart
        return not self._synchronised or (inside and whole and self.plan.num_losses == 1)

    def scaled(
        self,
        loss: Tensor,
        *,
        lanes: Sequence[Lane],
        loss_id: int = 0,
        delay: bool = False,
        report: Callable[[LossScaler, Tensor], None] | None = None,
    ) -> AbstractContextManager[Tensor]:
        """The loss times its scale, for a backward pass in the body; afterwards its gradients are taken in.

        If the body raises, gradients and state are as they were before it. Where gradients of the window wait scaled, autograd
        may have added to them, and the window begins anew.

        Args:
            loss: any shape.
            lanes: the optimizers whose parameters get gradients in the body.
            loss_id: which loss scaler is used.
            delay: leave the gradients scaled for a later block.
            report: called with the scaler and the block's ``found_inf``; None notes them for the next step.
        """
        return self.phases.block(loss, self.scaler(loss_id), lanes, delay=delay, report=report)

    @traced_inline
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        optimizers: Iterable[Optimizer] | Optimizer | None = None,
        keep_gradients: bool = False,
    ) -> StepResult:
        """End a backward pass; at the end of an accumulation window clip, step or skip, and move the loss scale.

        Gradients are dropped afterwards, unless they are to be kept. Waits for the device once, or never with an
        optimizer that takes ``found_inf``.

        Args:
            closure: for optimizers such as LBFGS; it runs ``engine.backward(loss)`` and returns the loss.
            optimizers: those to step; None means all. With accumulation they must all be stepped together.
            keep_gradients: leave the parameters' own gradients in place; masters never keep theirs.

        Raises:
            OrderError: the last backward pass was not synchronised, so its gradients are still scaled; or it was
                ``loss.backward()``, whose gradients never reach masters.
            OrderError: some of several optimizers under accumulation, whose windows are counted in steps of all.
            LossScaleCollapse: gradients stay non-finite and the scale cannot fall any more. The model is unchanged.
        """
        if is_dynamo_compiling() and self.whole is not None:
            return self.whole.step(optimizers, closure=closure, keep_gradients=keep_gradients)
        return self._run_step(closure, optimizers, keep_gradients=keep_gradients)

    @untraced
    def _run_step(
        self,
        closure: Callable[[], Any] | None,
        optimizers: Iterable[Optimizer] | Optimizer | None,
        *,
        keep_gradients: bool,
    ) -> StepResult:
        lanes = self.lanes_of(optimizers)
        every = self.plan.accumulation.every
        if every > 1 and len(lanes) < len(self.lanes):
            raise OrderError(
                f"accumulate={every} counts the steps of all {len(self.lanes)} optimizers together, so they cannot be "
                "stepped in turn; write engine.step(), or prepare an engine for each optimizer"
            )
        return self.phases.step(lanes, closure, keep_gradients=keep_gradients)

    def unscale(self) -> Tensor:
        """Make the gradients of the open window true-sized now, where the optimizers read them: ``group["params"]``.

        Without a fused optimizer they are so after every backward pass; one of :mod:`halfpeak.fused` reads them scaled in
        its step. Call this before you look at gradients or change them.

        Returns:
            1 if one of them is not finite.  # f32[]

        Raises:
            OrderError: the last backward pass was not synchronised, so its gradients wait for the next.
        """
        for lane in self.lanes:
            lane.take_in()
        return self.phases.unscale(self.lanes)[0]

    def abort(self, optimizers: Iterable[Optimizer] | Optimizer | None = None) -> None:
        """Drop the open window, which then begins anew: its gradients and its verdict. Scale and step counts stay.

        This is for after an exception, whatever raised it: the iteration counts if the optimizer had moved by then, and
        otherwise it is as if it had never begun.
        """
        self.phases.abort(self.lanes_of(optimizers))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bitwise resume needs, at any moment between two calls: plain values and live tensors.

        Models (float32, the masters' values), optimizers, loss scalers, counters, and the open accumulation window.
        Waits for the device.
        """
        self.journal.settle()
        return take_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        self.journal.settle()
        put_state(self, state)

    def catch_up(self) -> None:
        """What models do before they compute: a step that an exception has left is put right, a new one may begin."""
        self.phases.catch_up(self.lanes)
        self.buffers.begin()

    def memory(self) -> Memory:
        """How many bytes are held now, by what they are for; see :class:`halfpeak.Memory`."""
        return measure(self)

    def remove(self) -> None:
        """Take every hook off models and optimizers and give the optimizers the models' own parameters back.

        Models keep the dtypes they were converted to and the rounded values; what the masters knew beyond them is gone, as
        are the gradients of an open window. Take :meth:`state_dict` before, to prepare again where this engine was.
        """
        for handle in self.handles:
            handle.remove()
        for lane in self.lanes:
            lane.detach()
        self.handles.clear()
        self.phases.release.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """An engine of its own over copies of models and optimizers, in the same state down to the open window."""
        self.journal.settle()
        return copy_engine(self, memo)

    def __reduce__(self) -> NoReturn:
        raise OrderError(
            "an engine is joined to its models and optimizers by hooks and cannot be pickled; save engine.state_dict(), or "
            "write copy.deepcopy(engine)"
        )

    def scaler(self, loss_id: int) -> LossScaler:
        """The loss scaler with that number; see :func:`~halfpeak.engine.lookup.find_scaler`."""
        return find_scaler(self.scalers, loss_id)

    def lanes_of(self, optimizers: Iterable[Optimizer] | Optimizer | None) -> list[Lane]:
        """The lanes of the given optimizers; see :func:`~halfpeak.engine.lookup.find_lanes`."""
        return find_lanes(self.lanes, optimizers)
