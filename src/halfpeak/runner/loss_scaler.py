"""LossScaler: a loss scale for training loops of user code. Compatible with mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from halfpeak.checkpoint.scaler_states import from_mmcv
from halfpeak.core.errors import ConfigError, StateError
from halfpeak.core.schedule import ScaleConfig
from halfpeak.ops import foreach
from halfpeak.optim.loss_scale import MMCV_RULE, parse_loss_scale
from halfpeak.state.loss_scaler import LossScaler as EngineScaler


class LossScaler:
    """A dynamic or static loss scale. It reads gradients but changes none.

    ::

        overflow   scale = max(scale / scale_factor, 1)
        clean      after scale_window clean updates in a row: scale = scale * scale_factor

    Args:
        init_scale: the initial scale.
        mode: ``"dynamic"``, or ``"static"`` for a constant scale.
        scale_factor: the factor by which the scale grows and falls.
        scale_window: the number of clean updates in a row before the scale grows.

    Attributes:
        cur_scale: the current scale.
        cur_iter: the number of updates so far.
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
            # float32's largest power of two, because the loop that uses this class bounds the scale itself
            "ceiling": 2.0**127,
        }
        config = parse_loss_scale(given, MMCV_RULE)
        self._scaler = EngineScaler(config or MMCV_RULE)
        self.mode = mode
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self._is_loaded = False

    @classmethod
    def of(cls, config: ScaleConfig) -> Self:
        """A scaler with the given rule, such as a hook's."""
        made = cls(2.0**16, "dynamic" if config.dynamic else "static", config.growth, config.interval)
        made._scaler = EngineScaler(config)
        return made

    def follow(self, scaler: EngineScaler) -> None:
        """Use an engine's scaler from now on; first load this object's state into it, if updated or loaded."""
        if self.cur_iter or self._is_loaded:
            scaler.load_state_dict(self._scaler.state_dict())
        self._scaler, self._is_loaded = scaler, False

    @property
    def cur_scale(self) -> float:
        """The current scale. Waits for the device."""
        return self._scaler.read_scale()

    @property
    def loss_scale(self) -> float:
        """The current scale. Waits for the device."""
        return self.cur_scale

    def get_scale(self) -> float:
        """The current scale, under the name that ``GradScaler`` has for it. Waits for the device."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether any element of a gradient of ``params`` is not finite. Waits for the device."""
        return not foreach.all_finite([param.grad for param in params if param.grad is not None])

    def update_scale(self, overflow: bool | Tensor) -> None:
        """Update the scale after a step that overflowed or not. A static scale stays the same and counts nothing."""
        if not self._scaler.config.dynamic:
            return
        overflow = bool(overflow)
        self._scaler.update(torch.tensor(float(overflow), dtype=torch.float32))
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """The state, with mmcv's six keys. Waits for the device."""
        return {
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
            "mode": self.mode,
            "last_overflow_iter": self.last_overflow_iter,
            "scale_factor": self.scale_factor,
            "scale_window": self.scale_window,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the scale and the rule that :meth:`state_dict` returned.

        Raises:
            StateError: a key is missing or unknown, or a value is out of range. Nothing was loaded.
        """
        numbers = from_mmcv(state_dict)
        try:
            rule = {key: state_dict[key] for key in ("mode", "scale_factor", "scale_window")}
            restored = LossScaler(init_scale=numbers["scale"], **rule)
        except KeyError as error:
            raise StateError(
                f"the state of a LossScaler has no {error}; pass what its state_dict() returned"
            ) from None
        except ConfigError as error:
            raise StateError(f"{error}; nothing was loaded") from None
        begun = restored._scaler.state_dict()
        restored._scaler.load_state_dict({**begun, "clean": numbers["clean"]})
        restored.cur_iter = state_dict["cur_iter"]
        restored.last_overflow_iter = state_dict["last_overflow_iter"]
        restored._is_loaded = True
        vars(self).update(vars(restored))
