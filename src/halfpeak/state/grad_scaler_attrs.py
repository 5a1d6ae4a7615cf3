"""The private attributes of ``torch.amp.GradScaler``, as properties over a loss scaler of halfpeak.

torch's getters, setters and ``state_dict`` read these attributes, and so does user code.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from halfpeak.state.loss_scaler import LossScaler


class GradScalerAttrs(torch.cuda.amp.GradScaler):
    """torch's class without its constructor: the methods inherited from it read and write the loss scaler.

    ``torch.cuda.amp.GradScaler`` is a subclass of ``torch.amp.GradScaler``, so ``isinstance`` is true for both.
    """

    _scaler: LossScaler

    @property
    def _scale(self) -> Tensor:  # type: ignore[override]
        return self._scaler.state.scale

    @property
    def _growth_tracker(self) -> Tensor:  # type: ignore[override]
        return self._scaler.state.clean

    @property
    def _init_scale(self) -> float:
        return self._scaler.config.init

    @property
    def _growth_factor(self) -> float:
        return self._scaler.config.growth

    @_growth_factor.setter
    def _growth_factor(self, value: float) -> None:
        self._scaler.config = replace(self._scaler.config, growth=value)

    @property
    def _backoff_factor(self) -> float:
        return self._scaler.config.backoff

    @_backoff_factor.setter
    def _backoff_factor(self, value: float) -> None:
        self._scaler.config = replace(self._scaler.config, backoff=value)

    @property
    def _growth_interval(self) -> int:
        return self._scaler.config.interval

    @_growth_interval.setter
    def _growth_interval(self, value: int) -> None:
        self._scaler.config = replace(self._scaler.config, interval=value)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Move the scale to ``dev``; accelerate calls this under FSDP2 before it loads a state."""
        self._scaler.to(torch.device(dev))
