"""Reporting skipped steps: the printed line, and ``amp.last_step``."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from halfpeak.amp.session import Run, _amp_state
from halfpeak.core.errors import OrderError
from halfpeak.core.messages import overflow_line
from halfpeak.core.step_result import StepResult


def last_step(optimizer: Optimizer) -> StepResult:
    """Return the result of the last ``optimizer.step()``: whether it was skipped, and the loss scale afterwards.

    For a learning-rate schedule that counts only real updates::

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
    """Register the hooks that report the steps of a run's optimizers."""
    for optimizer in run.engine.optimizers:
        report = _StepReport(weakref.ref(run))
        optimizer.register_step_pre_hook(report.before)
        optimizer.register_step_post_hook(report.after)


class _StepReport:
    """Step hooks of one optimizer. They run after the engine's step hooks, which decide whether the step is skipped."""

    def __init__(self, run: weakref.ref[Run]) -> None:
        self._run = run
        self._skipped = False

    def before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the step: note whether it is skipped."""
        run = self._run()
        self._skipped = run is not None and run.engine.is_skipping(optimizer)

    def after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After the step: store its result, and print the line of a skipped step."""
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
        if self._skipped and run.verbosity > 0:
            print(overflow_line(loss_id, float(scale), dynamic=scaler.dynamic))
