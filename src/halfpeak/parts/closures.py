"""ScaledClosure: closures (``optimizer.step(closure)``, LBFGS, SAM) under loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halfpeak.core.errors import ClosureError
from halfpeak.parts.parts import Parts
from halfpeak.parts.window import Window


class ScaledClosure:
    """What an optimizer calls instead of a user's closure: it sees only unscaled, finite gradients.

    Each call publishes the masters, because the optimizer may have moved them, and calls the closure. While its
    gradients are not finite, the loss scale falls and the closure runs again.

    Args:
        parts: of the optimizer.
        window: of the optimizer, whose step is running.
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
        window: Window,
        closure: Callable[[], Any],
        *,
        drops: bool,
        accept: Callable[[], object],
        retry: Callable[[], object],
    ) -> None:
        self._parts, self._window, self._closure = parts, window, closure
        self._drops, self._accept, self._retry = drops, accept, retry
        self._was_called = False

    def replace_overflow(self) -> None:
        """Before the step: if gradients of a pass before it, which SAM reads, are not finite, let the closure make new ones."""
        parts, window = self._parts, self._window
        window.unscale()
        if bool(parts.found_inf([window], trusts_versions=False)):
            window.drop()
            parts.stats.end_step(True, parts.stats_of([window]))
            self()

    def __call__(self) -> Any:
        """Run the closure until its gradients are finite; returns what the closure returns."""
        parts, window = self._parts, self._window
        while True:
            if self._drops and self._was_called:
                window.drop()
            self._was_called = True
            parts.publish(window)
            loss = self._closure()
            parts.agree(to_weights=False)
            window.unscale()
            if window.low and window.gradients() and not window.losses:
                raise ClosureError(
                    "the closure's backward pass did not go through halfpeak, so its loss was not scaled; write "
                    "`with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, or engine.backward(loss), inside the "
                    "closure"
                )
            # Waits for the device. Optimizers with closures are host code that reads the loss, and wait anyway.
            if not bool(parts.found_inf([window])):
                self._accept()
                return loss
            self._retry()
            window.drop()
