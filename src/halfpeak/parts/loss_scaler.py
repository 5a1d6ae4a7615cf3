"""LossScaler: owns the loss scale of one loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from halfpeak.core.errors import LossIdError
from halfpeak.core.schedule import (
    NONFINITE_LOSS,
    SCALER_STATE,
    ScaleConfig,
    ScalerState,
    ScaleState,
    advance,
    require_scale,
)
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require
from halfpeak.core.torch_compat import host_values, refuse_inference_mode

S = TypeVar("S")


class LossScaler:
    """The loss scale of one loss: a :class:`~halfpeak.core.schedule.ScaleConfig` and the state it moves.

    Example:
        >>> import torch
        >>> scaler = LossScaler(ScaleConfig(init=8.0))
        >>> scaler.scale(torch.tensor(0.5))
        tensor(4.)
        >>> scaler.update(torch.ones(()))
        >>> scaler.read_scale()
        4.0
    """

    def __init__(self, config: ScaleConfig, device: torch.device | str | None = None) -> None:
        self.config = config
        self.state: ScaleState = config.start(device)

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` in float32 or wider, times the scale; see :func:`scale_loss`."""
        return scale_loss(loss, self.state.scale)

    def update(self, found_inf: Tensor) -> None:
        """Move the scale after an update whose gradients were finite (``found_inf`` 0) or not. Does not wait."""
        self.state = advance(self.config, self.state, found_inf.to(self.state.scale.device))

    def to(self, device: torch.device) -> None:
        """Move the state to another device."""
        self.state = ScaleState(*(part.to(device) for part in self.state))

    def set_scale(self, value: float) -> None:
        """Replace the scale, keeping the counters.

        Raises:
            ConfigError: ``value`` is not a finite number above zero.
        """
        number = require_scale("loss_scale", value)
        self.state = self.state._replace(scale=torch.full_like(self.state.scale, number))
        if not self.config.dynamic:
            self.config = replace(self.config, init=number)

    def __repr__(self) -> str:
        """The scale, and whether it is dynamic. Waits for the device."""
        return f"{type(self).__name__}(scale={self.read_scale():g}, {'dynamic' if self.config.dynamic else 'static'})"

    def read_scale(self) -> float:
        """The scale as a number. Waits for the device."""
        return float(self.state.scale)

    def read_exhausted(self) -> bool:
        """Whether ``patience`` overflows in a row could not lower the scale. Waits for the device."""
        patience = self.config.patience
        return patience is not None and int(self.state.stuck) >= patience

    def state_dict(self) -> ScalerState:
        """The state as plain numbers. Waits for the device."""
        return {
            "scale": float(self.state.scale),
            "clean": int(self.state.clean),
            "grace": int(self.state.grace),
            "stuck": int(self.state.stuck),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. A static scale is configuration, and stays.

        Raises:
            StateError: a key is missing or unknown, or a value is out of range. Nothing was loaded.
        """
        self.state = self.parse(state)

    def load_translated(self, state: Mapping[str, Any]) -> None:
        """Load a state of a library without hysteresis, which :mod:`halfpeak.checkpoint.scaler_states` has translated.

        Raises:
            StateError: as :meth:`load_state_dict`.
        """
        self.load_state_dict({**state, "grace": self.config.hysteresis})

    def parse(self, state: Mapping[str, Any]) -> ScaleState:
        """The state that :meth:`load_state_dict` would load. Changes nothing."""
        refuse_inference_mode("load_state_dict()")
        old, new = self.state, require(state, "state", SCALER_STATE)
        return ScaleState(
            scale=torch.full_like(old.scale, new["scale"]) if self.config.dynamic else old.scale,
            clean=torch.full_like(old.clean, new["clean"]),
            grace=torch.full_like(old.grace, new["grace"]),
            stuck=torch.full_like(old.stuck, new["stuck"]),
        )


def scaler_of(scalers: Sequence[S], loss_id: int, call: str) -> S:
    """The loss scaler with index ``loss_id``; negative indices count from the end.

    Args:
        scalers: one per loss.
        loss_id: the index.
        call: that takes ``num_losses``, for the message.

    Raises:
        LossIdError: there is no such scaler.
    """
    if not -len(scalers) <= loss_id < len(scalers):
        raise LossIdError(
            f"loss_id={short_repr(loss_id)} with num_losses={len(scalers)}; write a loss_id below num_losses, or "
            f"{call} with num_losses={loss_id + 1 if loss_id >= 0 else -loss_id}"
        )
    return scalers[loss_id]


def is_unit(scaler: LossScaler) -> bool:
    """Whether a loss scale is always 1."""
    return not scaler.config.dynamic and scaler.config.init == 1


def scale_loss(loss: Tensor, scale: Tensor) -> Tensor:
    """``loss`` in float32 or wider, times ``scale``; differentiable.

    The upcast comes first, so that the product of a float16 loss does not overflow.
    """
    wide = loss if loss.dtype in (torch.float64, torch.complex64, torch.complex128) else loss.float()
    return wide * scale.to(loss.device)


def nonfinite_loss(loss: Tensor) -> Tensor | None:
    """``NONFINITE_LOSS`` if a scalar loss is not finite, else 0; None if the host knows it is finite. Never waits."""  # f32[]
    known = host_values(loss)
    if known is not None and math.isfinite(known[0]):
        return None
    value = loss.detach().float()
    return torch.nan_to_num(value - value, nan=NONFINITE_LOSS).reshape(())
