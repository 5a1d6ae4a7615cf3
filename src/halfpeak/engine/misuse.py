"""Mistakes that would train wrongly in silence: backward passes past halfpeak, and edits of scaled gradients."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from halfpeak.core.dtypes import is_low
from halfpeak.core.errors import OrderError
from halfpeak.engine.gradients.params import ParamPairs


def refuse_unseen_backward(pairs: ParamPairs) -> None:
    """Refuse a step after a backward pass that the engine has not seen: nothing would move.

    Raises:
        OrderError: ``loss.backward()`` was called on the loss itself.
    """
    if pairs.has_low_gradient():
        raise OrderError(
            "the backward pass did not go through halfpeak, so its gradients never reached the float32 masters and this step "
            "would move nothing; write engine.backward(loss), or with amp `with amp.scale_loss(loss, optimizer) as scaled: "
            "scaled.backward()`"
        )


def refuse_edits(grads: Iterable[Tensor | None]) -> None:
    """Refuse what somebody wrote into gradients that wait scaled for the step of a fused optimizer.

    The value written is ambiguous: was it meant scaled or unscaled? Zeros are allowed in a parameter's own dtype, as
    ``zero_grad(set_to_none=False)`` writes them.

    Raises:
        OrderError: something else was written.
    """
    if any(grad is not None and (grad.is_sparse or is_low(grad) or bool(grad.any())) for grad in grads):
        raise OrderError(
            "gradients were written while they waited, still scaled, for the step of a fused optimizer; write "
            "engine.unscale() before you clip or change them, and engine.backward(loss) for every loss"
        )
