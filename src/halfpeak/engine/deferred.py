"""Deferred: gradients that stay as autograd left them until the step of a fused optimizer reads them there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from halfpeak.engine.bypass import refuse_edited
from halfpeak.engine.served import Served
from halfpeak.engine.trace import Trace
from halfpeak.fused.layout import gradients_of
from halfpeak.ops import foreach
from halfpeak.parts.loss_scaler import LossScaler

if TYPE_CHECKING:
    from halfpeak.engine.block import Block
    from halfpeak.engine.lane import Lane
    from halfpeak.engine.roster import Roster


class Deferred(Served):
    """The gradients of one backward pass, low and scaled; the sum of their squares once it is measured.

    Nobody can tell whether somebody who writes to them meanwhile takes them for true-sized, so that is refused; except
    where they are, or where zeros are written. ``optimizer.zero_grad()`` reaches masters only. It is noticed by a marker
    that lies as the gradient of one of them, too small to count but in a way that a factor leaves it above zero.

    Args:
        lane: of the fused optimizer.
        block: of the backward pass. Its ``found_inf`` is known from :meth:`measure` or :meth:`take_in` on.
        scaler: whose scale that was.
        scale: what the loss was multiplied by.  # f32[]
    """

    def __init__(self, lane: Lane, block: Block, scaler: LossScaler, scale: Tensor) -> None:
        super().__init__(lane, scale.reciprocal())
        is_true = not scaler.config.dynamic and scaler.config.init == 1
        self._masters = block.slots.highs
        self._marker = lane.roster().smallest_master
        if self._marker is not None:
            self._marker.grad = torch.full_like(self._marker, _MARK)
        waiting = block.slots.lows if is_true else block.slots.sources
        self._trace = Trace()
        self._trace.keep(waiting if self._marker is None else [*waiting, self._marker])
        block.hold_weakly()
        self._block = block
        self._scale = scale
        self._is_untouched = False

    def are_there(self) -> bool:
        """Whether the optimizer was not told to drop them.

        Raises:
            OrderError: somebody has written to them, or has given the masters gradients.
        """
        touched = self._trace.touched()
        refuse_edited(touched)
        self._is_untouched = not touched
        marker, self._marker = self._marker, None
        if marker is None:
            return True
        left, marker.grad = marker.grad, None
        given = gradients_of(self._masters)
        if given.count(None) < len(given):
            refuse_edited(given)
        if any(grad is left for grad in touched if grad is not None):
            # zero_grad(set_to_none=False): zeros are what the optimizer is to read.
            torch._foreach_zero_([g for g in gradients_of(self._lane.roster().sources) if g is not None])
        return left is not None

    def take_in(self) -> None:
        """Make them true-sized float32 after all."""
        self._block.absorb(self._scale)

    def withdraw(self, *, keep: bool) -> bool:
        """See :class:`~halfpeak.engine.served.Served`."""
        slots = self._block.slots if keep else ()
        own = [(s.source, s.source.grad) for s in slots if s.source is s.target and s.source.grad is not None]
        for source in self._feed.lows:
            source.grad = None
        if own:
            foreach.scale_([grad for _, grad in own], self._feed.factor)
        for source, grad in own:
            source.grad = grad
        return not keep

    def _gradients(self, roster: Roster) -> Sequence[Tensor | None]:
        # They have just been looked at.
        known = self._trace.known(roster.sources) if self._is_untouched else None
        return gradients_of(roster.sources) if known is None else known

    def _note(self, found_inf: Tensor) -> None:
        self._block.found_inf.copy_(found_inf)
        super()._note(found_inf)


_MARK: Final = 2.0**-100
