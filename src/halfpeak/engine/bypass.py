"""Noticing backward passes and steps that went past halfpeak, whose gradients would be missed or taken scaled."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Final

from torch import Tensor

from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import OrderError
from halfpeak.engine.slots import Phase

if TYPE_CHECKING:
    from halfpeak.engine.lane import Lane


def went_past(lane: Lane) -> bool:
    """Whether low parameters that have masters hold gradients which nobody has taken in."""
    return not all(map(is_, map(_GRAD, lane.slots().lows), repeat(None)))


_GRAD: Final = attrgetter("grad")


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


def refuse_edited(grads: Iterable[Tensor | None]) -> None:
    """Refuse gradients that somebody has written while others wait scaled for the step of a fused optimizer.

    Args:
        grads: what was written. Zeros in a parameter's own dtype are what ``zero_grad(set_to_none=False)`` writes.

    Raises:
        OrderError: something else was written: nobody knows at which scale.
    """
    if any(grad is not None and (grad.is_sparse or is_low(grad) or bool(grad.any())) for grad in grads):
        raise OrderError(
            "gradients were written while they waited, still scaled, for the step of a fused optimizer; write "
            "engine.unscale() before you clip or change them, and engine.backward(loss) for every loss"
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
