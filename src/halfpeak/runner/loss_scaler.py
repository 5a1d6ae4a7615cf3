"""LossScaler: a loss scale for loops that scale, check and step by themselves. Answers to mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfpeak.checkpoint.foreign import from_mmcv
from halfpeak.core.errors import ConfigError, StateError
from halfpeak.core.schedule import ScaleConfig, advance
from halfpeak.ops import foreach
from halfpeak.runner.scale_rules import MMCV_RULE, parse_loss_scale


class LossScaler:
    """A loss scale, dynamic or static; it touches no gradient.

    ::

        overflow   scale = max(scale / scale_factor, 1)
        clean      after scale_window clean updates in a row: scale = scale * scale_factor

    Args:
        init_scale: the first scale.
        mode: ``"dynamic"``, or ``"static"`` for a scale that never moves.
        scale_factor: by what the scale grows and falls.
        scale_window: clean updates in a row before it grows.

    Attributes:
        cur_scale: the scale.
        cur_iter: updates so far.
        last_overflow_iter: the update of the last overflow; -1 before the first.

    Raises:
        ConfigError: an unknown mode, or a value out of range.

    >>> scaler, scales = LossScaler(init_scale=8.0, scale_window=3), []
    >>> for overflow in (False, False, False, True):
    ...     scales.append(scaler.loss_scale)
    ...     scaler.update_scale(overflow)
    >>> scales, scaler.loss_scale
    ([8.0, 8.0, 8.0, 16.0], 8.0)
    """

    def __init__(
        self,
        init_scale: float = 2**32,
        mode: str = "dynamic",
        scale_factor: float = 2.0,
        scale_window: int = 1000,
    ) -> None:
        given = {
            "init_scale": init_scale,
            "mode": mode,
            "scale_factor": scale_factor,
            "scale_window": scale_window,
        }
        # As far as a float32 goes: whoever holds this class reads the scale and bounds it.
        self._config: ScaleConfig = parse_loss_scale({**given, "ceiling": 2.0**127}, MMCV_RULE)
        self._state = self._config.start()
        self.mode = mode
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.cur_iter = 0
        self.last_overflow_iter = -1

    @property
    def cur_scale(self) -> float:
        """The scale."""
        return float(self._state.scale)

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of ``params`` is not finite, element by element. Waits for the device."""
        grads = [param.grad for param in params if param.grad is not None]
        if not grads:
            return False
        found_inf = torch.zeros((), device=grads[0].device)
        foreach.check_(grads, found_inf)
        return bool(found_inf)

    def update_scale(self, overflow: bool | Tensor) -> None:
        """Move the scale after an update that overflowed or not. A static one stays as it is, and counts nothing."""
        if not self._config.dynamic:
            return
        overflow = bool(overflow)
        self._state = advance(self._config, self._state, torch.tensor(float(overflow)))
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """The state, in mmcv's six keys."""
        return {
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
            "mode": self.mode,
            "last_overflow_iter": self.last_overflow_iter,
            "scale_factor": self.scale_factor,
            "scale_window": self.scale_window,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, its rule included.

        Raises:
            StateError: a key is missing or unknown, or a value is out of range. Nothing was loaded.
        """
        numbers = from_mmcv(state_dict)
        try:
            rule = {key: state_dict[key] for key in ("mode", "scale_factor", "scale_window")}
            restored = LossScaler(init_scale=numbers["scale"], **rule)
        except (ConfigError, KeyError) as error:
            raise StateError(f"{error}; nothing was loaded") from None
        restored._state = restored._state._replace(clean=torch.full_like(self._state.clean, numbers["clean"]))
        restored.cur_iter = state_dict["cur_iter"]
        restored.last_overflow_iter = state_dict["last_overflow_iter"]
        vars(self).update(vars(restored))
