"""Steward: answers a lane whose optimizer is being stepped, by the engine, by its caller, or with a closure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from halfpeak.core.errors import LossScaleCollapse
from halfpeak.engine.bypass import require_taken_in
from halfpeak.engine.journal import Journal
from halfpeak.engine.lane import Lane
from halfpeak.engine.names import ParameterNames
from halfpeak.engine.plan import Plan
from halfpeak.engine.slots import Phase
from halfpeak.parts.loss_scaler import LossScaler
from halfpeak.parts.verdict import Verdict


class Steward:
    """Reaches the verdict of a step that the caller began, and looks after closures and collapsing scales.

    It knows no lane and no engine, so lanes can hold it and keep working for as long as their optimizer lives.
    """

    def __init__(
        self,
        plan: Plan,
        journal: Journal,
        scalers: Sequence[LossScaler],
        verdict: Verdict,
        names: ParameterNames,
    ) -> None:
        self.steps_itself = plan.steps_itself
        self._clip = plan.clip
        self._journal = journal
        self._scalers = scalers
        self._verdict = verdict
        self._names = names
        self._foreseen: LossScaleCollapse | None = None
        self._culprits: tuple[str, ...] = ()

    def decide(self, lane: Lane, *, has_closure: bool) -> bool:
        """Whether to skip the step that the caller began with ``optimizer.step()``. Waits for the device.

        Raises:
            OrderError: its backward pass went past halfpeak.
        """
        if lane.phase is Phase.CLEAN and not has_closure:
            # Inside a window, and before a closure, what lies there may be left over from another loss.
            require_taken_in(lane)
        verdicts = lane.found_inf.reshape(1).clone()
        self._verdict.agree_(verdicts)
        skip = bool(verdicts[0])
        self._journal.begin(verdicts, skip, Lane.parameters_of([lane]))
        exhausted = skip and any(scaler.read_exhausted() for scaler in self._scalers)
        # The gradients that name the culprits are gone when the step is over.
        self._foreseen = self.collapse([lane]) if exhausted else None
        return skip

    def finished(self, lane: Lane, verdict: Tensor | bool) -> None:
        """The caller's step is over: its consequences hold.

        Raises:
            LossScaleCollapse: it was skipped, and the loss scale cannot fall any further.
        """
        if not self.steps_itself:
            self._journal.settle()
            foreseen, self._foreseen = self._foreseen, None
            if foreseen is not None:
                raise foreseen

    def closure_failed(self, lane: Lane) -> None:
        """A closure's gradients were not finite and it is about to run again: lower the scale.

        Raises:
            LossScaleCollapse: the scale is static, or cannot fall any further.
        """
        noted = self._journal.noted
        for scaler, found_inf in noted:
            scaler.update(found_inf)
        self._journal.cancel_try()
        used = [scaler for scaler, _ in noted] or self._scalers
        if not any(scaler.config.dynamic for scaler in used) or any(
            scaler.read_exhausted() for scaler in used
        ):
            raise self.collapse([lane])

    def closure_passed(self, lane: Lane) -> None:
        """A closure's gradients are finite and about to be used: clip them."""
        self._clip(lane.targets())

    def look(self, lanes: Iterable[Lane]) -> None:
        """Note which gradients are not finite, before clipping spreads one nan over all. Waits for the device."""
        self._culprits = self._names.nonfinite(lanes)

    def collapse(self, lanes: Iterable[Lane]) -> LossScaleCollapse:
        """The error that names the parameters whose gradients are not finite. Waits for the device."""
        names = self._culprits or self._names.nonfinite(lanes)
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        scale = min(scaler.read_scale() for scaler in self._scalers)
        return LossScaleCollapse(
            f"gradients stay non-finite at a loss scale of {scale:g}, which cannot fall any further. "
            f"Not finite: {shown or 'no parameter of this step'}. Lower the learning rate, clip, keep these layers in "
            "float32, or use bfloat16 (O4, O5)",
            names,
        )
