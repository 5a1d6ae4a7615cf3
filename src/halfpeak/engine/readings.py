"""Readings: what can be read of an engine without changing it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError
from halfpeak.core.policy import Policy
from halfpeak.engine.journal import Journal
from halfpeak.engine.lane import Lane
from halfpeak.engine.plan import Plan
from halfpeak.engine.slots import Phase
from halfpeak.parts.loss_scaler import LossScaler


class Readings:
    """What an :class:`~halfpeak.Engine` tells of itself. Nothing here waits for the device but :meth:`read_scale`."""

    plan: Plan
    models: tuple[nn.Module, ...]
    lanes: list[Lane]
    scalers: Sequence[LossScaler]
    journal: Journal

    @property
    def model(self) -> nn.Module:
        """The model, where there is exactly one.

        Raises:
            OrderError: there are several; use :attr:`models`.
        """
        if len(self.models) != 1:
            raise OrderError(f"this engine has {len(self.models)} models; write engine.models[i]")
        return self.models[0]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in the order they were prepared."""
        return [lane.optimizer for lane in self.lanes]

    @property
    def index(self) -> int:
        """Completed calls of :meth:`step`, counted since the beginning of the run."""
        return self.journal.index

    @property
    def policy(self) -> Policy:
        """In which dtype each thing is stored, computed and returned."""
        return self.plan.policy

    @property
    def taken(self) -> Tensor:
        """Steps in which the optimizers moved.  # i32[]"""
        return self.journal.taken

    @property
    def skipped(self) -> Tensor:
        """Steps that were skipped because a gradient was not finite.  # i32[]"""
        return self.journal.skipped

    @property
    def has_open_window(self) -> bool:
        """Whether gradients of a step to come are held."""
        return any(lane.phase is not Phase.CLEAN for lane in self.lanes)

    def read_scale(self, loss_id: int = 0) -> float:
        """The loss scale as a number. Waits for the device."""
        return self.scalers[loss_id].read_scale()

    @property
    def scale(self) -> Tensor:
        """The scale of loss 0.  # f32[]"""
        return self.scalers[0].state.scale
