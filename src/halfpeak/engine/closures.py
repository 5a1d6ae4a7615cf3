"""ScaledClosure: closures (``optimizer.step(closure)``, LBFGS, SAM) under loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halfpeak.core.errors import ClosureError
from halfpeak.engine.parts import Parts
from halfpeak.state.found_inf import found_inf_of
from halfpeak.state.scaled_pass import unscale_left
from halfpeak.state.stepped_params import SteppedParams


class ScaledClosure:
    """What an optimizer calls instead of a user's closure: it sees only unscaled, finite gradients.

    Each call publishes the masters, because the optimizer may have moved them, and calls the closure. While its
    gradients are not finite, the loss scale falls and the closure runs again.

    Args:
        parts: of the optimizer.
        params: of the optimizer, whose step is running.
        closure: runs forward and backward, and returns the loss.
        drops: whether each call first drops the gradients of the call before, as ``engine.step(closure)`` does. In
            ``optimizer.step(closure)`` the closure calls ``zero_grad()``, as in plain torch.
        accept: called with gradients that are finite and about to be used, to clip them.
        retry: called when they are not, to lower the scale; raises if it cannot fall.

    Raises:
        ClosureError: the backward pass in the closure bypassed halfpeak, so its loss was not scaled.
        LossScaleCollapse: gradients stay non-finite although the scale cannot fall.
    """

    def __init__(
        self,
        parts: Parts,
        params: SteppedParams,
        closure: Callable[[], Any],
        *,
        drops: bool,
        accept: Callable[[], object],
        retry: Callable[[], object],
    ) -> None:
        self._parts, self._params, self._closure = parts, params, closure
        self._drops, self._accept, self._retry = drops, accept, retry
        self._was_called = False

    def __call__(self) -> Any:
        """Run the closure until its gradients are finite; returns what the closure returns."""
        pairs, params = self._parts.pairs, self._params
        while True:
            if self._drops and self._was_called:
                pairs.drop_gradients([params])
            self._was_called = True
            pairs.publish(params)
            loss = self._closure()
            pairs.agree(to_weights=False)
            unscale_left(pairs, self._parts.memory)
            if params.low and params.gradients() and not params.losses:
                raise ClosureError(
                    "the closure's backward pass did not go through halfpeak, so its loss was not scaled; write "
                    "`with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, or engine.backward(loss), inside the "
                    "closure"
                )
            # Waits for the device. Optimizers with closures are host code that reads the loss, and wait anyway.
            if not bool(found_inf_of([params], self._parts.device)):
                self._accept()
                return loss
            self._retry()
            pairs.drop_gradients([params])
