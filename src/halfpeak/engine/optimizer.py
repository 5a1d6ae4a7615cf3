"""PreparedOptimizer: one optimizer with its masters, its window of gradients and its running step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError
from halfpeak.core.optimizer_state import are_params_of
from halfpeak.core.torch_compat import host_values, untraced
from halfpeak.engine.gradients.accumulate import GradAccumulator, kernels_for
from halfpeak.engine.gradients.fused_grads import pending_without_sentinel
from halfpeak.engine.gradients.params import ParamPairs, ParamTable
from halfpeak.engine.gradients.window import (
    NOTHING_STASHED,
    Empty,
    Pending,
    Scaled,
    Unscaled,
    Window,
    after_backward,
)
from halfpeak.engine.step_call import StepCall, take_back_found_inf
from halfpeak.engine.step_record import ForeignLoss
from halfpeak.fused.base import FusedOptimizer
from halfpeak.ops import foreach
from halfpeak.ops.foreach import are_none, gradients_of
from halfpeak.state.masters import Masters


class PreparedOptimizer:
    """One optimizer: its masters, its window of gradients, and the step that runs.

    Args:
        optimizer: stored as a weak reference, because its hooks refer to this object.
        masters: shared by the optimizers of an engine, so that a parameter of two optimizers has one master.
        models: all of the engine.
        device: of ``found_inf``.
        num_optimizers: how many the engine has.

    Attributes:
        window: where the gradients of the coming step are.
        running: the step that has begun and not ended, or None.
        ended: the last step that ended, until the next begins; else None.
        foreign_losses: losses for other optimizers that left gradients in the window.
        thread: the thread that trains it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: Masters,
        models: Sequence[nn.Module],
        device: torch.device,
        *,
        num_optimizers: int = 1,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.masters = masters
        self.models = models
        self.num_optimizers = num_optimizers
        self._empty = Empty(torch.zeros((), dtype=torch.float32, device=device))
        self.window: Window = self._empty
        self.running: StepCall | None = None
        self.ended: StepCall | None = None
        self.foreign_losses: list[ForeignLoss] = []
        self._table: ParamTable | None = None
        # Whether user code has zeroed or edited gradients since the last step that may not have been finite.
        self._lost_found_inf = False
        self._num_layouts = 0
        self.thread = threading.get_ident()
        _PREPARED[self] = None

    def detach(self) -> None:
        """Put the low-precision parameters back into the groups."""
        _PREPARED.pop(self, None)
        optimizer = self._optimizer()
        if optimizer is not None:
            if isinstance(self.window, Scaled | Pending):
                self.drop()  # After this, nothing would unscale these gradients.
            self.remove_sentinel()
            self.masters.release(optimizer)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer.

        Raises:
            OrderError: it does not exist any more.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            raise OrderError("the optimizer of this engine does not exist any more; keep a reference to it")
        return optimizer

    @property
    def found_inf(self) -> Tensor:
        """1 if a gradient of the window was not finite.  # f32[]"""
        return self.window.found_inf

    @property
    def is_open(self) -> bool:
        """Whether the window holds gradients."""
        return not isinstance(self.window, Empty)

    @property
    def has_scaled_grads(self) -> bool:
        """Whether gradients of the window wait scaled for a later backward pass."""
        return isinstance(self.window, Scaled)

    def table(self) -> ParamTable:
        """The parameters that are in the groups now."""
        table = self._table
        if table is None or not table.is_current(self.optimizer):
            # Not cached: the next backward pass must see that the groups changed, to give new parameters masters.
            return ParamTable(self.optimizer, self.masters)
        return table

    def cached_table(self) -> ParamTable:
        """The table of the last backward pass, whose ``pairs`` may be out of date; :meth:`table` if the groups changed."""
        table = self._table
        return table if table is not None and are_params_of(self.optimizer, table.members) else self.table()

    def pairs_to_step(self) -> ParamPairs:
        """The parameters that were trainable at the last backward pass of the window; if it is empty, those that are now."""
        pairs = self.window.pairs
        return self.table().pairs if pairs is None else pairs

    def pairs_now(self) -> ParamPairs:
        """The parameters that are trainable now, and those frozen since the backward pass that have a gradient of it."""
        return self._with_frozen(self.table())

    def _with_frozen(self, table: ParamTable) -> ParamPairs:
        stashed = self.window.stashed if isinstance(self.window, Scaled) else NOTHING_STASHED
        return table.pairs_with_frozen(self.window.pairs, stashed)

    def main_grads(self) -> list[Tensor]:
        """The gradients that the optimizer reads. Pending ones are unscaled first; those of a Scaled window are not."""
        self.unscale_pending()
        return self.pairs_to_step().main_grads()

    # The gradients of the window.

    def begin_backward(self) -> ParamPairs:
        """Before a backward pass: take over changes of groups, weights and gradients since the last one."""
        self.unscale_pending()
        table = self._adopt_new_params()
        # User code may add to the masters after this pass (SAM), so they must have the values that the pass used.
        self.masters.refresh()
        pairs = self._with_frozen(table)
        self.remove_sentinel()
        if isinstance(self.window, Unscaled):
            self._note_edited_grads(self.window, pairs)
        elif isinstance(self.window, Empty):
            self.note_unseen_grads(pairs)
        return pairs

    def _adopt_new_params(self) -> ParamTable:
        """Give new parameters in the groups masters. Gradients that they already have join the window."""
        table = self._table
        if table is not None and table.is_current(self.optimizer):
            return table
        self.masters.agree_on_requires_grad()
        self.unscale_pending()
        # In a Scaled window the gradients of new parameters are scaled, too, and stay where they are.
        self.masters.adopt(self.optimizer, move_grads=not isinstance(self.window, Scaled))
        table = self._table = ParamTable(self.optimizer, self.masters)
        window = self.window
        if isinstance(window, Unscaled):
            # No backward pass of the engine has checked whether the gradients of new parameters are finite.
            self.window = window._replace(pairs=table.pairs_with_frozen(window.pairs))
            self.note_unseen_grads()
        elif isinstance(window, Empty) and not are_none(gradients_of(table.pairs.masters)):
            self.note_unseen_grads()
            self.set_window(after_backward(self.window, table.pairs, self.window.found_inf))
        return table

    def _note_edited_grads(self, window: Unscaled, pairs: ParamPairs) -> None:
        """After an edit of gradients, compute ``found_inf`` again; after ``zero_grad()``, empty the window."""
        if window.snapshot.unchanged():
            return
        self._note_lost_found_inf()
        grads = pairs.main_grads()
        if not grads:
            self.empty_window()
            return
        found_inf = torch.zeros_like(window.found_inf)
        foreach.check_(grads, found_inf)
        self.window = window._replace(found_inf=found_inf, is_edited=True)

    def note_unseen_grads(self, pairs: ParamPairs | None = None) -> list[Tensor]:
        """The gradients of ``pairs``. Those that no backward pass of the engine left count in ``found_inf`` now.

        Such gradients come from ``loss.backward()``, a pipeline schedule, or user code that writes gradients.
        """
        self.unscale_pending()
        window, pairs = self.window, self.pairs_to_step() if pairs is None else pairs
        by_param = gradients_of(pairs.main_params)
        grads = [grad for grad in by_param if grad is not None]
        if isinstance(window, Empty):
            window, unseen = self._empty, grads
        elif isinstance(window, Unscaled) and not grads and not window.snapshot.unchanged():
            self._note_lost_found_inf()
            self.empty_window()
            return grads
        elif isinstance(window, Unscaled) and self._lost_found_inf:
            unseen = grads
        elif isinstance(window, Unscaled):
            unseen = window.snapshot.changed_or_new(pairs.main_params, by_param)
        else:
            return grads
        if unseen:
            found_inf = window.found_inf.clone()
            foreach.check_(unseen, found_inf)
            window = window._replace(found_inf=found_inf)
        self.window = window
        return grads

    def _note_lost_found_inf(self) -> None:
        """Before ``found_inf`` is computed anew. User code may have kept the old gradients, and write them back (GEM, CAGrad).

        Such a write, through ``grad.data``, changes no version counter, so the step looks at every gradient.
        """
        known = host_values(self.found_inf)
        self._lost_found_inf |= known is None or bool(known[0])

    def check_grads(self) -> None:
        """Check every gradient before a step that user code calls, which may have written them in any way.

        Writes through ``grad.data`` (GEM, CAGrad) and reductions over the ranks by hand change no version counter.
        """
        found_inf = torch.zeros_like(self.found_inf)
        foreach.check_(self.note_unseen_grads(), found_inf)
        self.note_found_inf(found_inf)

    def set_window(self, window: Unscaled | Scaled) -> None:
        """Set the window that a backward pass has left, with a sentinel where a parameter is free for one."""
        smallest = window.pairs.smallest
        if isinstance(window, Scaled):
            window = window.with_sentinel()
        elif smallest is not None and not self.masters.is_shared(smallest.model):
            window = window.with_sentinel(smallest.model)
        self.window = window
        if self.num_optimizers > 1:
            self.masters.retain_grads(self, window.snapshot.holders)

    def remove_sentinel(self) -> None:
        """Before gradients are added or stepped: drop the window if user code called ``zero_grad()``.

        Raises:
            OrderError: user code edited gradients that wait scaled.
        """
        if isinstance(self.window, Scaled | Unscaled):
            window = self.window.without_sentinel()
            if window is None:
                self._note_lost_found_inf()
                self.drop()
            else:
                self.window = window

    def unscale_pending(self) -> None:
        """Unscale gradients that were left to the step, because other code is about to read them or add to them."""
        sentinel = self.window.sentinel if isinstance(self.window, Unscaled) else None
        if sentinel is not None and sentinel.is_zeroed():
            self._note_lost_found_inf()
            self.drop()
        pending = self.pending_grads(self.cached_table()) if isinstance(self.window, Pending) else None
        if pending is None:
            return
        window = pending[0]
        kernels = kernels_for([self.optimizer], window.pairs.main_params)
        accumulator = GradAccumulator(
            window.scale.reciprocal(), window.pass_found_inf, kernels, self.masters.grad_buffers
        )
        accumulator.accumulate(window.pairs, NOTHING_STASHED)
        self.set_window(after_backward(window, window.pairs, window.pass_found_inf))

    def pending_grads(self, table: ParamTable) -> tuple[Pending, list[Tensor | None]] | None:
        """The pending gradients in the order of ``table``; None if there are none or ``zero_grad()`` dropped them."""
        if not isinstance(self.window, Pending):
            return None
        pending = pending_without_sentinel(self.window, table)
        if pending is None:
            self.drop()
        else:
            self.window = pending[0]
        return pending

    def note_found_inf(self, found_inf: Tensor) -> None:
        """Record the ``found_inf`` that a fused step measured when it read the gradients of the window.  # f32[]"""
        if isinstance(self.window, Pending):
            self.window.pass_found_inf.copy_(found_inf)
        self.window = self.window._replace(found_inf=torch.maximum(self.window.found_inf, found_inf))

    def note_nonfinite_loss(self, nonfinite: Tensor) -> None:
        """Make the step skip if ``nonfinite`` is not 0: the loss of a backward pass was itself not finite.  # f32[]"""
        before = self.window.found_inf
        found_inf = torch.maximum(before, nonfinite.to(before.device).clamp(max=1))
        self.window = self.window._replace(found_inf=found_inf)

    # The end of the window: drop() drops its gradients, too, and empty_window() leaves them.

    def drop(self) -> None:
        """Drop the window and every gradient of the optimizer's parameters and masters."""
        for holder in self.cached_table().grad_holders(self.window.pairs):
            holder.grad = None
        self.masters.release_grads(self)
        self.window, self.foreign_losses = self._empty, []

    def drop_master_grads(self) -> None:
        """Drop the gradients of masters, unless another optimizer still has to step them."""
        self.masters.release_grads(self)
        for master in self.pairs_to_step().masters:
            if not self.masters.is_grad_retained(master):
                master.grad = None

    def empty_window(self) -> None:
        """Begin a new window; gradients stay where they are."""
        self.remove_sentinel()
        self.window, self.foreign_losses = self._empty, []

    def close_window(self, call: StepCall) -> None:
        """End the step and begin a new window.

        After ``engine.step()``, :meth:`clear_after_step` drops the gradients when all optimizers have stepped, because
        two may share a master. After a user-called step, the gradients of masters are dropped here.
        """
        is_cleared = call.fused is not None and call.fused.clear(keep=call.keep_gradients)
        if call.fused is not None:
            self.cancel_fused_inputs()
        # call.fused refers to the optimizer, whose hooks refer to this object: keeping it would be a cycle.
        self.ended = call._replace(fused=None, collapse=None, is_cleared=is_cleared)
        self._lost_found_inf = False
        if not call.by_engine:
            self.drop_master_grads()
        self.empty_window()
        self.end_running()

    def clear_after_step(self, *, keep: bool) -> None:
        """Drop the gradients that a step has left; with ``keep`` only those of masters."""
        if keep:
            self.drop_master_grads()
        elif self.ended is None or not self.ended.is_cleared:
            self.drop()

    # The running step.

    def begin_step(self) -> ParamTable:
        """Before a step: take over changes of groups, gradients and weights since the backward pass."""
        # Freezing or unfreezing a parameter after the backward pass has no effect on this step.
        table = self.cached_table()
        if self.is_open and table is not self._table:
            table = self._adopt_new_params()
        self.remove_sentinel()
        self.masters.refresh()
        return table

    def has_mutated(self) -> bool:
        """Whether the optimizer's own code has changed anything in the running step, or had nothing to change."""
        call = self.running
        return call is not None and call.progress is not None and call.progress.has_mutated(self.optimizer)

    def record_layout(self) -> bool:
        """Whether the parameters may lie in other memory than at the last call. Records their layout."""
        optimizer = self.optimizer
        if not isinstance(optimizer, FusedOptimizer):
            return True
        before, self._num_layouts = self._num_layouts, optimizer.num_layouts
        return optimizer.num_layouts != before

    def cancel_fused_inputs(self) -> None:
        """Let a fused optimizer read ``.grad`` of its parameters again."""
        if isinstance(optimizer := self._optimizer(), FusedOptimizer):
            optimizer.set_step_inputs(None)

    def end_running(self) -> None:
        """Clear :attr:`running` and take ``found_inf`` back from the optimizer."""
        if self.running is not None:
            if (optimizer := self._optimizer()) is not None:
                take_back_found_inf(optimizer)
            self.running = None


@untraced
def claim_for_thread(prepared: Iterable[PreparedOptimizer]) -> dict[PreparedOptimizer, Optimizer]:
    """Make this thread train ``prepared``; return all prepared optimizers that it trains, in the order they were prepared.

    The values are the optimizers, so that they are not garbage-collected while the caller loops over the dict.
    """
    here = threading.get_ident()
    for one in prepared:
        one.thread = here
    alive = [one for known in _PREPARED.keyrefs() if (one := known()) and one.thread == here]
    return {one: optimizer for one in alive if (optimizer := one._optimizer()) is not None}


_PREPARED: Final[weakref.WeakKeyDictionary[PreparedOptimizer, None]] = weakref.WeakKeyDictionary()
"""All prepared optimizers that are alive."""
