"""Closures (``optimizer.step(closure)``, LBFGS) under loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from halfpeak.core.errors import ClosureError
from halfpeak.engine.bypass import went_past

if TYPE_CHECKING:
    from halfpeak.engine.lane import Lane
    from halfpeak.engine.slots import Owner

Closure = Callable[[], Any]
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class Guard:
    """Stands in for a user's closure: the optimizer sees true-sized, finite gradients of the current masters only.

    Each call publishes the masters, so that the forward pass sees where the optimizer has moved them, and calls the
    closure. While its gradients are not finite the loss scale falls and the closure is called again.

    Raises:
        ClosureError: the backward pass in the closure went past halfpeak, so its gradients never reached the masters.
        LossScaleCollapse: gradients stay non-finite although the scale cannot fall.
    """

    def __init__(self, closure: Closure, lane: Lane, owner: Owner) -> None:
        self._closure, self._lane, self._owner = closure, lane, owner

    def __call__(self) -> Any:
        """Evaluate once with finite gradients; returns what the user's closure returns."""
        lane = self._lane
        while True:
            if len(lane.masters):
                # zero_grad() of a model does not reach its masters.
                lane.drop()
                lane.masters.publish(lane.optimizer)
            loss = self._closure()
            lane.take_in()
            if went_past(lane):
                raise ClosureError(
                    "the closure's backward pass did not go through halfpeak, so its gradients never reached the float32 "
                    "masters; write `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, or "
                    "engine.backward(loss), inside the closure"
                )
            # A closure is host code that decides by its loss: it waits for the device anyway.
            if not bool(lane.found_inf):
                self._owner.closure_passed(lane)
                lane.masters.mark_stepped(lane.optimizer)
                return loss
            self._owner.closure_failed(lane)
            lane.drop()


def take_closure(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Closure | None, Callable[[Closure], StepArguments]]:
    """The closure in the arguments of ``Optimizer.step`` (``args[0]`` is the optimizer), and how to put in another."""
    if len(args) > 1:
        return args[1], lambda closure: ((args[0], closure, *args[2:]), dict(kwargs))
    return kwargs.get("closure"), lambda closure: (args, {**kwargs, "closure": closure})
