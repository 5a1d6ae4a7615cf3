"""Run: what one call of ``initialize`` has prepared, and the order of the user's own ``optimizer.step()`` in it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.optim import Optimizer

from halfpeak.amp.scaler import LossScaler, lower_scales, overflowed
from halfpeak.casting.casts import OpCasts
from halfpeak.core.decide import Decision, decide
from halfpeak.core.messages import overflow_line
from halfpeak.core.step_result import StepResult
from halfpeak.core.torch_compat import refuse_inference_mode
from halfpeak.ops import foreach
from halfpeak.ops.shards import local_of
from halfpeak.parts import loss_scaler
from halfpeak.parts.checks import DataWrites
from halfpeak.parts.closures import ScaledClosure
from halfpeak.parts.model_hooks import hook_forward
from halfpeak.parts.nonfinite import NonfiniteReport
from halfpeak.parts.parts import Parts
from halfpeak.parts.step_hooks import Closure, SkippedStep, hook_steps
from halfpeak.parts.window import Window, loss_facts


class Run:
    """One call of ``initialize``.

    ::

        forward            weights and masters agree
        scale_loss         the pass, then the loss scale moves; see :func:`halfpeak.amp.scale_loss`
        optimizer.step()   before   agree; skip, if a gradient is not finite, or was not in a block that listed the optimizer
                           step     the optimizer's own code; on a skip it finds no gradients
                           after    publish the masters, and keep the gradients until ``zero_grad``, as in plain torch; on a
                                    skip take back what the optimizer has counted

    A run ends with its optimizers: only their step hooks refer to it, and it has no reference to them.

    Attributes:
        parts: the models and optimizers.
        scalers: the loss scalers, under apex's names.
        casts: the casting scope (O1, O4), or None.
        verbosity: as given to ``initialize``.
        loss_ids: of the loss scalers, also those of other runs whose blocks have listed an optimizer of this one.
        results: of the last step of each optimizer.
    """

    def __init__(self, parts: Parts, *, casts: OpCasts | None, verbosity: int) -> None:
        self.parts, self.casts, self.verbosity = parts, casts, verbosity
        self.scalers = [LossScaler(scaler) for scaler in parts.scalers]
        self.loss_ids = {scaler: number for number, scaler in enumerate(parts.scalers)}
        self.results: dict[Window, StepResult] = {}
        self._data_writes = DataWrites(parts.pairs)
        # Skipped steps that have begun, each with the number of calls of after_step that are to come.
        self._skipped: dict[Window, tuple[SkippedStep, int]] = {}
        parts.handles += [hook_forward(model, parts.before_forward) for model in parts.models]
        for window in parts.windows:
            parts.handles += hook_steps(window, self)
            # The hooks above refer to the run weakly; by this one the optimizer keeps it alive.
            parts.handles.append(window.optimizer.register_step_post_hook(partial(_keep_alive, self)))

    def before_step(self, window: Window, closure: Closure | None) -> Closure | None:
        """Before the optimizer's own code: skip the step, or wrap its closure. Waits for the device.

        Warns:
            RuntimeWarning: no backward pass in ``scale_loss`` has added to these gradients, at a level that scales.

        Raises:
            OrderError: the gradients are not reduced over the ranks.
            LossScaleCollapse: the step is to be skipped, and the loss scale cannot fall any further.
        """
        refuse_inference_mode("optimizer.step()")
        self.parts.is_stepping = True
        self.parts.agree()
        self._data_writes.compare()
        if window.is_empty():
            window.close()  # what its passes have found went with the gradients
        if closure is not None:
            self._skipped.pop(window, None)
            retry = partial(self._retry_closure, window)
            wrapped = ScaledClosure(
                self.parts, window, closure, drops=False, accept=lambda: None, retry=retry
            )
            wrapped.replace_overflow()
            return wrapped
        if window.is_empty():
            if window in self._skipped:
                # Inside of the skipped step: the step of a base class, or of an inner optimizer.
                skipped, calls = self._skipped[window]
                self._skipped[window] = skipped, calls + 1
            return None
        self._skipped.pop(window, None)
        window.unscale()
        self._warn_of_plain_pass(window)
        decision, losses = self._decide(window)
        if decision.skip:
            self._skip(window, decision, losses)
        return None

    def after_step(self, window: Window) -> None:
        """After the optimizer's own code."""
        self.parts.is_stepping = False
        if window in self._skipped:
            skipped, calls = self._skipped.pop(window)
            skipped.undo_counts()
            # SAM has put the masters back by ``p.data = old``, which nothing shows.
            self.parts.publish(window)
            if calls > 1:
                self._skipped[window] = skipped, calls - 1
            return
        self.parts.publish(window)
        self.parts.stats.end_step(False, self.parts.stats_of([window]))
        window.close()
        scale = self.parts.scalers[0].state.scale
        self.results[window] = StepResult(torch.zeros_like(scale), scale)
        self._data_writes.sample()

    def _warn_of_plain_pass(self, window: Window) -> None:
        """Warn of gradients of a loss that was not scaled. Zeros are left by ``zero_grad``, closed ones by the last step."""
        if window.losses or window.is_closed or all(map(loss_scaler.is_unit, self.parts.scalers)):
            return
        if bool(foreach.global_norm(local_of(window.gradients())) != 0):
            warnings.warn(_PLAIN_PASS, RuntimeWarning, stacklevel=5)

    def _decide(self, window: Window) -> tuple[Decision, list[loss_scaler.LossScaler]]:
        """Whether to skip. The blocks have moved the loss scales, but those of blocks that did not list the optimizer.

        Waits for the device, and looks at gradients that seem unwritten: GEM and CAGrad write them through ``.data``.
        """
        found = self.parts.found_inf([window], trusts_versions=False)
        losses = loss_facts([window], found, self.parts.scalers)
        facts = [loss._replace(counts=False) for loss in losses.values()]
        decision = decide(found, facts)
        return decision._replace(skip=bool(decision.skip)), list(losses)

    def _skip(self, window: Window, decision: Decision, losses: Sequence[loss_scaler.LossScaler]) -> None:
        """Change nothing in this step: gradients go, batch-norm statistics go back, and the line is printed."""
        blamed = overflowed(window) or self.parts.scalers
        for scaler, state in zip(losses, decision.states, strict=True):
            scaler.state = state
        is_over = any(scaler.read_exhausted() for scaler in blamed)
        collapse = NonfiniteReport(self.parts, blamed).error([window]) if is_over else None
        window.drop()
        self.parts.stats.end_step(True, self.parts.stats_of([window]))
        if collapse is not None:
            raise collapse
        scaler = blamed[0]
        scale = scaler.state.scale
        self.results[window] = StepResult(torch.ones_like(scale), scale)
        self._skipped[window] = SkippedStep(window), 1
        if self.verbosity > 0:
            print(overflow_line(self.loss_ids.get(scaler, 0), float(scale), dynamic=scaler.config.dynamic))

    def _retry_closure(self, window: Window) -> None:
        """A closure's gradients were not finite, and it runs again: its block, or this, has lowered the loss scale.

        Raises:
            LossScaleCollapse: the scale is static, or cannot fall any further.
        """
        collapse = lower_scales(self.parts, window, self.scalers)
        if collapse is not None:
            raise collapse


_PLAIN_PASS: Final = (
    "since the last step no backward pass in scale_loss has added to these gradients; a loss that is not scaled loses small "
    "ones in float16; write `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
)


def _keep_alive(run: Run, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A step hook that only holds a reference."""
