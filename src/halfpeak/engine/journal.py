"""Journal: what a step has decided and not yet applied, so that an exception neither loses nor repeats it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfpeak.core.schedule import ScaleState, advance
from halfpeak.fused.books import Account
from halfpeak.parts.buffers import BatchNormBuffers
from halfpeak.parts.loss_scaler import LossScaler


@dataclass(frozen=True, slots=True)
class _Entry:
    """The consequences of one step, all values computed beforehand: applying an entry twice is harmless."""

    scales: list[tuple[LossScaler, ScaleState]]
    taken: Tensor
    skipped: Tensor
    index: int
    verdict: Tensor | bool
    models: frozenset[int] | None


class Journal:
    """Collects ``found_inf`` per loss over a window, and applies the consequences of a step exactly once.

    Attributes:
        taken: steps in which the optimizers moved.  # i32[]
        skipped: steps that were skipped.            # i32[]
        index: steps and accumulated backward passes together.

    Args:
        buffers: the batch-norm statistics to settle.
        device: where the counters live.
    """

    def __init__(self, buffers: BatchNormBuffers, device: torch.device) -> None:
        self.taken = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped = torch.zeros((), dtype=torch.int32, device=device)
        self.index = 0
        self._buffers = buffers
        self._noted: list[tuple[LossScaler, Tensor]] = []
        self._entry: _Entry | None = None

    @property
    def noted(self) -> list[tuple[LossScaler, Tensor]]:
        """The loss scalers used since the last step, each with its ``found_inf``."""
        return list(self._noted)

    def note(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Remember that a backward pass used ``scaler``."""
        for index, (known, so_far) in enumerate(self._noted):
            if known is scaler:
                self._noted[index] = (known, torch.maximum(so_far, found_inf))
                return
        self._noted.append((scaler, found_inf))

    def verdicts(self, found_infs: Sequence[Tensor]) -> Tensor:
        """The verdict of the step, then that of each noted loss, in one tensor that ranks can agree on at once."""
        home = found_infs[0]
        step = torch.stack([found_inf.to(home.device) for found_inf in found_infs]).max()
        return torch.stack([step, *(found_inf.to(home.device) for _, found_inf in self._noted)])

    def begin_accounted(self, account: Account) -> None:
        """Take over the consequences of a step of all optimizers that were decided where the gradients are."""
        ((scaler, _),) = self._noted
        self._entry = _Entry(
            scales=[(scaler, account.state)],
            taken=account.taken,
            skipped=account.skipped,
            index=self.index + 1,
            verdict=account.found_inf,
            models=None,
        )

    def begin(self, verdicts: Tensor, verdict: Tensor | bool, parameters: Iterable[Tensor] | None) -> None:
        """Decide the consequences of a step about to be taken.

        Args:
            verdicts: what :meth:`verdicts` gave.  # f32[1 + noted]
            verdict: its first element, read if the host knows it.
            parameters: what the step is of; None for all that the engine trains.
        """
        if isinstance(verdict, bool):
            taken, skipped = self.taken + (not verdict), self.skipped + verdict
        else:
            skips = verdicts[0].to(torch.int32)
            taken, skipped = self.taken + (1 - skips), self.skipped + skips
        self._entry = _Entry(
            scales=[
                (scaler, advance(scaler.config, scaler.state, verdicts[1 + i].to(scaler.state.scale.device)))
                for i, (scaler, _) in enumerate(self._noted)
            ],
            taken=taken,
            skipped=skipped,
            index=self.index + 1,
            verdict=verdict,
            models=None if parameters is None else self._buffers.touched_by(parameters),
        )

    def read_collapse(self) -> bool:
        """Whether the step about to be skipped would exhaust a loss scale's patience. Waits for the device."""
        entry = self._entry
        return entry is not None and any(
            scaler.config.patience is not None and int(state.stuck) >= scaler.config.patience
            for scaler, state in entry.scales
        )

    def cancel(self) -> None:
        """The step did not happen: drop its consequences and what was noted."""
        self._entry = None
        self._noted.clear()

    def cancel_try(self) -> None:
        """The evaluation of a closure is thrown away, and with it what it told the batch norms."""
        self.cancel()
        self._buffers.settle(True)

    def rewind(self, every: int) -> None:
        """Begin the accumulation window of ``every`` backward passes anew."""
        self.index -= self.index % every

    def settle(self) -> None:
        """Apply the consequences of a step that happened, if any are outstanding."""
        entry = self._entry
        if entry is None:
            return
        for scaler, state in entry.scales:
            scaler.state = state
        self.taken, self.skipped, self.index = entry.taken, entry.skipped, entry.index
        self._buffers.settle(entry.verdict, entry.models)
        self._noted.clear()
        self._entry = None

    def hold(self, taken: Tensor, skipped: Tensor) -> None:
        """Keep the counters in these tensors from here on.  # i32[], i32[]"""
        self.taken, self.skipped = taken, skipped

    def state_dict(self) -> dict[str, int]:
        """The counters. Waits for the device."""
        return {"taken": int(self.taken), "skipped": int(self.skipped), "index": self.index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counters; what was outstanding or noted is dropped."""
        self.cancel()
        self.taken = torch.full_like(self.taken, state["taken"])
        self.skipped = torch.full_like(self.skipped, state["skipped"])
        self.index = state["index"]
