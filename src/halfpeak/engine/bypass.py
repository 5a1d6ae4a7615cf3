"""Noticing backward passes and steps that went past halfpeak, whose gradients would be missed or taken scaled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfpeak.core.errors import OrderError
from halfpeak.engine.slots import Phase

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


def refuse_half_way(phase: Phase, *, is_own: bool) -> None:
    """Refuse an ``optimizer.step()`` of the caller's in the middle of a window.

    Args:
        phase: where the gradients stand.
        is_own: whether the engine alone calls ``optimizer.step()``.

    Raises:
        OrderError: gradients are still scaled, or the engine is to step them.
    """
    if phase is Phase.SCALED:
        raise OrderError(
            "optimizer.step() was called on gradients that are still scaled: the last backward pass was delayed "
            "(delay_unscale=True, or no_sync); end the window with one that is not"
        )
    if is_own and phase is not Phase.CLEAN:
        raise OrderError("optimizer.step() was called inside an engine's window; write engine.step()")
