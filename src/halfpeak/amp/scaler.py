"""LossScaler: a loss scaler under the names of ``apex.amp.scaler``; the scales of a closure that runs again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from halfpeak.amp.delegation import delegated
from halfpeak.core.errors import LossScaleCollapse
from halfpeak.parts import loss_scaler
from halfpeak.parts.nonfinite import NonfiniteReport
from halfpeak.parts.parts import Parts
from halfpeak.parts.window import Window


class LossScaler:
    """A view of one loss scaler of a run under apex's names, as in ``amp._amp_state.loss_scalers``.

    Reading a value waits for the device; a step reads none.
    """

    def __init__(self, scaler: loss_scaler.LossScaler) -> None:
        self.part = scaler
        self.found_inf: Tensor = torch.zeros_like(scaler.state.scale)
        """1 if a backward pass since the last update of the scale overflowed.  # f32[]"""

    def loss_scale(self) -> float:
        """The scale, as a number."""
        return self.part.read_scale()

    dynamic: bool = delegated("part.config.dynamic")
    """Whether the scale moves."""
    _max_loss_scale: float = delegated("part.config.ceiling")
    _min_loss_scale: float = delegated("part.config.floor")

    @property
    def _loss_scale(self) -> float:
        return self.part.read_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.part.set_scale(value)

    @property
    def _unskipped(self) -> int:
        return int(self.part.state.clean)

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        state = self.part.state
        self.part.state = state._replace(clean=torch.full_like(state.clean, value))

    @property
    def _scale_seq_len(self) -> int:
        return self.part.config.interval

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: int) -> None:
        self.part.config = replace(self.part.config, interval=value)

    @property
    def _has_overflow(self) -> bool:
        return bool(self.found_inf)

    @property
    def _overflow_buf(self) -> Tensor:
        return self.found_inf

    @_overflow_buf.setter
    def _overflow_buf(self, value: Tensor) -> None:
        # A script may set its own flag for one update and then restore the old one. Zeroed, the old one counts nothing.
        given = value.detach().reshape(()).to(self.found_inf, copy=True)
        self.found_inf.zero_()
        self.found_inf = given

    def clear_overflow_state(self) -> None:
        """Drop an overflow that has not updated the scale yet."""
        self.found_inf = torch.zeros_like(self.found_inf)

    def update_scale(self) -> bool:
        """Update the scale once for all backward passes since the last update; return whether one overflowed. Waits.

        Needed only after blocks with ``delay_overflow_check=True``.
        """
        skip = self._has_overflow
        self.take(self.found_inf, delay=False)
        return skip

    def take(self, found_inf: Tensor, *, delay: bool) -> None:
        """Update the scale with the ``found_inf`` of a backward pass, or keep it for the next update. Does not wait."""
        found_inf = torch.maximum(self.found_inf, found_inf)
        if delay:
            self.found_inf = found_inf
            return
        # Cleared first, so that an exception in the update cannot make an overflow count twice.
        self.clear_overflow_state()
        self.part.update(found_inf)

    def state_dict(self) -> dict[str, float | int]:
        """``{"loss_scale": float, "unskipped": int}``."""
        return {"loss_scale": self.loss_scale(), "unskipped": self._unskipped}


def lower_scales(parts: Parts, window: Window, scalers: Iterable[LossScaler]) -> LossScaleCollapse | None:
    """Lower the loss scales of a closure that runs again because its gradients were not finite, unless its passes have.

    Args:
        parts, window: of the optimizer.
        scalers: those whose update a pass may have left to a later one.

    Returns:
        The error to raise, if no scale can fall; else None.
    """
    for one in scalers:
        if one._has_overflow:
            one.update_scale()
    blamed = overflowed(window)
    if not blamed:  # user code has written the values
        blamed = list(window.losses)
        for scaler in blamed:
            scaler.update(torch.ones_like(scaler.state.scale))
    parts.stats.end_step(True)
    if not any(s.config.dynamic for s in blamed) or any(s.read_exhausted() for s in blamed):
        return NonfiniteReport(parts, blamed or None).error([window])
    return None


def overflowed(window: Window) -> list[loss_scaler.LossScaler]:
    """The loss scalers of the passes that have overflowed in the window of an optimizer. Waits for the device."""
    return [scaler for scaler, noted in window.losses.items() if bool(noted.found)]
