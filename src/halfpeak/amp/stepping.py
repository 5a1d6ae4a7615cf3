"""What the door does when the caller steps an optimizer: say that a step was skipped, and keep what it did."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from halfpeak.amp.messages import maybe_print, overflow_line
from halfpeak.amp.session import Run, _amp_state
from halfpeak.core.errors import OrderError
from halfpeak.core.outcome import StepResult
from halfpeak.engine.lane import Lane


def last_step(optimizer: Optimizer) -> StepResult:
    """What the last ``optimizer.step()`` did: whether it was skipped, and the loss scale afterwards.

    A learning-rate schedule that should count real updates asks it::

        optimizer.step()
        if amp.last_step(optimizer).stepped():
            scheduler.step()

    Raises:
        OrderError: the optimizer was not initialised, or has not stepped yet.
    """
    try:
        run = _amp_state.run_of(optimizer)
    except KeyError:
        run = None
    result = None if run is None else run.results.get(id(optimizer))
    if result is None:
        raise OrderError(
            "this optimizer has not stepped under amp yet; call amp.initialize, then optimizer.step()"
        )
    return result


def report_steps(run: Run) -> None:
    """Watch the optimizers of a run."""
    for lane in run.engine.lanes:
        watch = _Watch(weakref.ref(run), lane)
        lane.optimizer.register_step_pre_hook(watch.before)
        lane.optimizer.register_step_post_hook(watch.after)


class _Watch:
    """Step hooks of one optimizer. They run after the lane's own, so the verdict is known."""

    def __init__(self, run: weakref.ref[Run], lane: Lane) -> None:
        self._run = run
        self._lane = lane
        self._skipped = False

    def before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The verdict is reached, nothing has moved."""
        self._skipped = self._lane.verdict is True

    def after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The step is over."""
        run = self._run()
        if run is None:
            return
        found = run.overflows.pop(id(optimizer), {})
        overflowed = [
            (number, scaler)
            for scaler, (number, found_inf) in found.items()
            if self._skipped and bool(found_inf)
        ]
        loss_id, scaler = overflowed[0] if overflowed else (0, run.scalers[0])
        scale = scaler.part.state.scale
        run.results[id(optimizer)] = StepResult(torch.full_like(scale, float(self._skipped)), scale)
        if self._skipped:
            line = overflow_line(loss_id, float(scale), dynamic=scaler.dynamic)
            maybe_print(line, verbosity=run.verbosity)
