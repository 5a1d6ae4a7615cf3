"""ScaledClosure: closures (``optimizer.step(closure)``, LBFGS) under loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halfpeak.core.errors import ClosureError
from halfpeak.engine.gradients.window import Unscaled
from halfpeak.engine.optimizer import PreparedOptimizer
from halfpeak.engine.step_call import Closure


class ScaledClosure:
    """Wraps a user's closure: the optimizer sees only unscaled, finite gradients of the current masters.

    Each call publishes the masters, because the optimizer may have moved them, and calls the closure. While its
    gradients are not finite, the loss scale falls and the closure runs again.

    In ``engine.step(closure)`` each call drops the gradients of the call before, so the closure needs no
    ``zero_grad()``. In ``optimizer.step(closure)`` the closure must call it, as in plain torch. Gradients from before
    the first call stay, because a closure may just return a loss whose backward pass has already run.

    Args:
        prepared: the optimizer that calls the closure; its step is running.
        accept: called when the gradients are finite and about to be used.
        retry: called when they are not, before the closure runs again; raises if the scale cannot fall.

    Raises:
        ClosureError: the backward pass in the closure bypassed halfpeak, so its gradients never reached the masters.
        LossScaleCollapse: gradients stay non-finite although the scale cannot fall.
    """

    def __init__(
        self,
        closure: Closure,
        prepared: PreparedOptimizer,
        *,
        accept: Callable[[PreparedOptimizer], None],
        retry: Callable[[PreparedOptimizer], None],
    ) -> None:
        self._closure, self._prepared, self._accept, self._retry = closure, prepared, accept, retry
        self._is_of_engine = prepared.running is not None and prepared.running.by_engine
        self._was_called = False

    def __call__(self) -> Any:
        """Run the closure until its gradients are finite; returns what the closure returns."""
        prepared = self._prepared
        masters = prepared.masters
        while True:
            if self._is_of_engine and self._was_called:
                prepared.drop()
            elif isinstance(prepared.window, Unscaled):
                # Places the sentinel again, to detect model.zero_grad() in the closure.
                prepared.set_window(prepared.window)
            self._was_called = True
            masters.publish(prepared.cached_table().master_indices)
            # In the closure no step is running: its passes would take a running step for one that raised.
            call, prepared.running = prepared.running, None
            try:
                loss = self._closure()
            finally:
                prepared.running = call
            prepared.unscale_pending()
            prepared.remove_sentinel()
            if prepared.pairs_to_step().has_low_gradient():
                raise ClosureError(
                    "the closure's backward pass did not go through halfpeak, so its gradients never reached the float32 "
                    "masters; write `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, or "
                    "engine.backward(loss), inside the closure"
                )
            # Waits for the device. Optimizers with closures are host code that reads the loss, and wait anyway.
            if not bool(prepared.found_inf):
                self._accept(prepared)
                masters.mark_stepped(prepared.cached_table().master_indices)
                return loss
            self._retry(prepared)
            prepared.drop()
