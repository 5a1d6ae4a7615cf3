"""Noticing a backward pass that went past halfpeak, whose gradients never reach the masters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfpeak.core.errors import OrderError

if TYPE_CHECKING:
    from halfpeak.engine.lane import Lane


def went_past(lane: Lane) -> bool:
    """Whether low parameters that have masters hold gradients which nobody has taken in."""
    return any(slot.source is not slot.target and slot.source.grad is not None for slot in lane.slots())


def require_taken_in(lane: Lane) -> None:
    """Refuse a step of which halfpeak has seen no backward pass, although there was one: nothing would move.

    Raises:
        OrderError: ``loss.backward()`` was called on the loss itself.
    """
    if went_past(lane):
        raise OrderError(
            "the backward pass did not go through halfpeak, so its gradients never reached the float32 masters and this step "
            "would move nothing; write engine.backward(loss), or with amp `with amp.scale_loss(loss, optimizer) as scaled: "
            "scaled.backward()`"
        )
