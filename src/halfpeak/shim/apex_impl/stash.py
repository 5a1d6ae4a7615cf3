"""AmpStash: ``optimizer._amp_stash``, and the other attributes that apex sets on an initialised optimizer.

halfpeak itself sets no attributes on a user's optimizer. These exist only while the shim is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.amp.master_groups import MasterGroups
from halfpeak.core.dtypes import is_low
from halfpeak.core.optimizer_state import params_of
from halfpeak.engine.optimizer import PreparedOptimizer, prepared_of

NAMES: Final = (
    "_amp_stash",
    "_amp_lazy_init",
    "_lazy_init_maybe_master_weights",
    "_master_params_to_model_params",
)


class AmpStash(MasterGroups):
    """The values of apex's ``optimizer._amp_stash``, read from the engine that steps the optimizer.

    Attributes:
        lazy_init_called: True from the start, because masters exist as soon as ``initialize`` returns. Scripts set it.
        already_patched: False, because a skipped step replaces no method.
    """

    def __init__(self, prepared: PreparedOptimizer) -> None:
        super().__init__(prepared.optimizer, prepared.masters)
        self._prepared = prepared
        self.lazy_init_called = True
        self.already_patched = False

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether gradients are still scaled, as after ``scale_loss(..., delay_unscale=True)``."""
        return self._prepared.has_scaled_grads

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The half-precision parameters that have a master; at levels without masters, all of them."""
        return _flat(self.fp16_groups) or [p for p in params_of(self.optimizer) if is_low(p)]

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """Parameters that are float32 in the model."""
        return [p for p in _flat(self.fp32_from_fp32_groups) if p.dtype is torch.float32]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """Masters of half-precision parameters."""
        return _flat(self.fp32_from_fp16_groups)

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The same as :attr:`all_fp32_params`."""
        return self.all_fp32_params

    def initialise(self) -> None:
        """Do nothing: apex creates masters here, halfpeak has created them in ``amp.initialize``."""

    def publish(self) -> None:
        """Round the masters into the model, as ``step`` does."""
        self._masters.publish(self._masters.indices_of(params_of(self.optimizer)))


def attach(optimizer: Optimizer) -> None:
    """Set the attributes on an initialised optimizer; with amp disabled it gets none, as in apex."""
    prepared = prepared_of(optimizer)
    if prepared is None:
        return
    stash = AmpStash(prepared)
    values = (stash, stash.initialise, stash.initialise, stash.publish)
    vars(optimizer).update(zip(NAMES, values, strict=True))


def detach(optimizers: Iterable[Optimizer]) -> None:
    """Remove the attributes."""
    for optimizer in optimizers:
        for name in NAMES:
            vars(optimizer).pop(name, None)


def _flat(groups: Sequence[list[Tensor]]) -> list[Tensor]:
    return [p for group in groups for p in group]
