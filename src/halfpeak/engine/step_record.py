"""StepRecord: the step counters, and the commit of a decided step, which an exception neither loses nor repeats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from halfpeak.core.schedule import ScaleState, advance
from halfpeak.core.state_checks import require_count, require_mapping
from halfpeak.fused.decision import StepDecision
from halfpeak.state.batch_norm import BatchNormStats
from halfpeak.state.loss_scaler import LossScaler


@dataclass(frozen=True, slots=True)
class PlannedCommit:
    """The values that one step will set, computed before it: applying them twice is harmless."""

    scales: list[tuple[LossScaler, ScaleState]]
    num_steps: Tensor
    num_skipped: Tensor
    micro_step: int
    found_inf: Tensor | bool
    models: frozenset[int] | None


class ForeignLoss(NamedTuple):
    """A loss for some optimizers whose backward pass left gradients in the window of another one.

    Attributes:
        scaler: lowered by the step of the other optimizer, which skips, if ``found_inf`` is 1 and ``counted`` is not.
        found_inf: 1 if a gradient that it left there is not finite.  # f32[]
        counted: becomes 1 when the scale falls for an overflow in the pass's own gradients.  # f32[]
        is_reduced: whether its backward pass reduced gradients over the ranks.
    """

    scaler: LossScaler
    found_inf: Tensor
    counted: Tensor
    is_reduced: bool


class StepRecord:
    """Collects ``found_inf`` per loss over a window, and commits each step exactly once.

    Attributes:
        num_steps: steps in which the optimizers moved.       # i32[]
        num_skipped: steps that were skipped.                 # i32[]
        micro_step: ended micro-steps of the run; the last one of each window is the step.
        num_dropped: passes and windows that an exception or ``abort()`` has ended in this process.

    Args:
        stats: the batch-norm statistics that a step keeps or a skip restores.
        device: of the counters.
    """

    def __init__(self, stats: BatchNormStats, device: torch.device) -> None:
        self.num_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.num_skipped = torch.zeros((), dtype=torch.int32, device=device)
        self.micro_step = 0
        self.num_dropped = 0
        self._stats = stats
        self._found_infs: dict[LossScaler, list[Tensor]] = {}
        self._nonfinite_losses: list[tuple[LossScaler, Tensor]] = []
        # ``counted`` of foreign losses, each with the ``found_inf`` that a commit copies into it.
        self._counted: list[tuple[Tensor, Tensor]] = []
        self._planned: PlannedCommit | None = None

    def add_found_inf(self, scaler: LossScaler, found_inf: Tensor, counted: Tensor | None = None) -> None:
        """Record that a backward pass used ``scaler``.

        Args:
            scaler: of its loss.
            found_inf: of its gradients. May be written later, when they are read.  # f32[]
            counted: takes its value when a step moves the scale for it; see :class:`ForeignLoss`.  # f32[]
        """
        self._found_infs.setdefault(scaler, []).append(found_inf)
        if counted is not None:
            self._counted.append((counted, found_inf))

    def add_nonfinite_loss(self, scaler: LossScaler, nonfinite: Tensor) -> None:
        """Record whether the loss itself was not finite: the result of :func:`~halfpeak.state.loss_scaler.nonfinite_loss`."""
        self._nonfinite_losses.append((scaler, nonfinite))

    @property
    def only_scaler(self) -> LossScaler | None:
        """The loss scaler of all gradients since the last step; None if there are several, or none."""
        return next(iter(self._found_infs)) if len(self._found_infs) == 1 else None

    @property
    def found_inf_per_scaler(self) -> list[tuple[LossScaler, Tensor]]:
        """The loss scalers used since the last step, each with its ``found_inf``."""
        return [
            (scaler, self.with_nonfinite_loss(scaler, reduce(torch.maximum, of_passes)))
            for scaler, of_passes in self._found_infs.items()
        ]

    @property
    def found_infs_to_save(self) -> list[tuple[LossScaler, Tensor]]:
        """:attr:`found_inf_per_scaler`, and whether losses whose gradients wait scaled were themselves not finite."""
        waiting = [
            (one, self.with_nonfinite_loss(one, found))
            for one, found in self._nonfinite_losses
            if one not in self._found_infs
        ]
        return [*self.found_inf_per_scaler, *waiting]

    def with_nonfinite_loss(self, scaler: LossScaler, found_inf: Tensor) -> Tensor:
        """``found_inf``, or ``NONFINITE_LOSS`` if a loss of ``scaler`` itself was not finite.  # f32[]"""
        for known, nonfinite in self._nonfinite_losses:
            if known is scaler:
                found_inf = torch.maximum(found_inf, nonfinite.to(found_inf.device))
        return found_inf

    def found_infs(self, of_optimizers: Sequence[Tensor]) -> Tensor:
        """``found_inf`` of the step, then of each used loss, in one tensor, so that one all-reduce is enough.

        Args:
            of_optimizers: ``found_inf`` of each optimizer's window.  # f32[] each
        """
        first = of_optimizers[0]
        step = first
        if len(of_optimizers) > 1:
            step = torch.stack([found_inf.to(first.device) for found_inf in of_optimizers]).max()
        return torch.stack(
            [step, *(found_inf.to(first.device) for _, found_inf in self.found_inf_per_scaler)]
        )

    def of_every_loss(self, found_infs: Tensor, scalers: Sequence[LossScaler]) -> Tensor:
        """``found_infs`` of the step, then of each of ``scalers``: -1 for one that this rank has not used.

        Ranks may use losses in another order, or some not at all, and must reduce the same losses.
        """  # f32[1 + scalers]
        used = dict(zip(self._found_infs, found_infs[1:], strict=True))
        unused = torch.full_like(found_infs[0], -1)
        self._found_infs = {scaler: self._found_infs.get(scaler, []) for scaler in scalers}
        return torch.stack([found_infs[0], *(used.get(scaler, unused) for scaler in scalers)])

    def plan_commit(
        self,
        found_infs: Tensor,
        found_inf: Tensor | bool,
        parameters: Iterable[Tensor] | None,
        foreign_losses: Iterable[ForeignLoss],
        *,
        has_gradients: bool = True,
    ) -> None:
        """Compute the commit of a step that is about to be taken.

        Args:
            found_infs: from :meth:`found_infs` or :meth:`of_every_loss`.  # f32[1 + losses]
            found_inf: its first element, as a bool if the host knows it.
            parameters: those of the step; None for all that the engine trains.
            foreign_losses: the losses for other optimizers that left gradients in these parameters.
            has_gradients: False if there is nothing to step, which counts neither as a step nor as a skip.
        """
        if not has_gradients:
            num_steps, num_skipped = self.num_steps, self.num_skipped
        elif isinstance(found_inf, bool):
            num_steps = self.num_steps if found_inf else self.num_steps + 1
            num_skipped = self.num_skipped + 1 if found_inf else self.num_skipped
        else:
            skips = found_infs[0].to(torch.int32)
            num_steps, num_skipped = self.num_steps + (1 - skips), self.num_skipped + skips
        foreign: dict[LossScaler, list[Tensor]] = {}
        for loss in foreign_losses:
            # Without a skip, user code has edited the gradients that overflowed.
            found = loss.found_inf * (found_infs[0] != 0).to(loss.found_inf)
            found = found * (1 - loss.counted.to(found))
            foreign.setdefault(loss.scaler, []).append(found)
        self._planned = PlannedCommit(
            scales=[
                *(
                    # An overflow counts, a finite pass does not.
                    (scaler, _advanced(scaler, reduce(torch.maximum, found), least=1))
                    for scaler, found in foreign.items()
                ),
                *(
                    # A loss that no rank has used does not count.
                    (scaler, _advanced(scaler, found_infs[1 + i], least=None if of_passes else 0))
                    for i, (scaler, of_passes) in enumerate(self._found_infs.items())
                ),
            ],
            num_steps=num_steps,
            num_skipped=num_skipped,
            micro_step=self.micro_step + 1,
            found_inf=found_inf,
            models=None if parameters is None else self._stats.models_of(parameters),
        )

    def plan_commit_from_decision(self, decision: StepDecision) -> None:
        """Take over the commit of a step of all optimizers that was decided on the device of the gradients."""
        ((scaler, of_passes),) = self._found_infs.items()
        if self._counted and len(of_passes) == 1:
            # A pass whose gradients waited scaled does not know yet what the decision has found in them.
            of_passes[0].copy_(decision.found_inf)
        self._planned = PlannedCommit(
            scales=[(scaler, decision.scale_state)],
            num_steps=decision.num_steps,
            num_skipped=decision.num_skipped,
            micro_step=self.micro_step + 1,
            found_inf=decision.found_inf,
            models=None,
        )

    def read_would_collapse(self) -> bool:
        """Whether the step about to be skipped would exhaust a loss scale's patience. Waits for the device."""
        planned = self._planned
        return planned is not None and any(
            scaler.config.patience is not None and int(state.stuck) >= scaler.config.patience
            for scaler, state in planned.scales
        )

    def discard(self) -> None:
        """Drop the commit of a step that did not happen, and the ``found_inf`` of its backward passes."""
        self._planned = None
        self._found_infs.clear()
        self._counted.clear()
        self._nonfinite_losses.clear()

    def discard_evaluation(self) -> None:
        """Discard an evaluation of a closure, and restore the batch-norm statistics from before it."""
        self.discard()
        self._stats.end_step(True)

    def restart_window(self, every: int) -> None:
        """Begin the accumulation window of ``every`` backward passes again, after an exception or ``abort()``."""
        self.num_dropped += 1
        self.micro_step -= self.micro_step % every

    def commit(self) -> None:
        """Apply the planned commit of a step that happened, if there is one."""
        planned = self._planned
        if planned is None:
            return
        for scaler, state in planned.scales:
            scaler.state = state
        for counted, found_inf in self._counted:
            counted.copy_(found_inf)
        self.num_steps, self.num_skipped = planned.num_steps, planned.num_skipped
        self.micro_step = planned.micro_step
        self._stats.end_step(planned.found_inf, planned.models)
        self.discard()

    def use_counters(self, num_steps: Tensor, num_skipped: Tensor) -> None:
        """Replace the counters by these tensors.  # i32[], i32[]"""
        self.num_steps, self.num_skipped = num_steps, num_skipped

    def state_dict(self) -> dict[str, int]:
        """The counters, under their names on disk. Waits for the device."""
        return {"taken": int(self.num_steps), "skipped": int(self.num_skipped), "index": self.micro_step}

    def parse(self, state: object) -> tuple[int, int, int]:
        """The counters that :meth:`load_state_dict` would restore. Changes nothing.

        Raises:
            StateError: a counter is missing, unknown or out of range.
        """
        known = require_mapping(state, "the counters", ("taken", "skipped", "index"))
        num_steps, num_skipped, micro_step = (
            require_count(known[name], name) for name in ("taken", "skipped", "index")
        )
        return num_steps, num_skipped, micro_step

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counters, and drop a planned commit.

        Raises:
            StateError: as :meth:`parse` does. Nothing was loaded.
        """
        num_steps, num_skipped, self.micro_step = self.parse(state)
        self.discard()
        self.num_steps = torch.full_like(self.num_steps, num_steps)
        self.num_skipped = torch.full_like(self.num_skipped, num_skipped)


def _advanced(scaler: LossScaler, found_inf: Tensor, *, least: int | None) -> ScaleState:
    """The next state of a scaler; the present one where ``found_inf`` is less than ``least``."""
    state = scaler.state
    found_inf = found_inf.to(state.scale.device)
    moved = advance(scaler.config, state, found_inf)
    if least is None:
        return moved
    return ScaleState(
        *(torch.where(found_inf >= least, new, old) for new, old in zip(moved, state, strict=True))
    )
