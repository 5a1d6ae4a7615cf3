"""``apex.amp.initialize``, which sets ``_amp_stash`` and other attributes of apex on an optimizer; the end of a session.

halfpeak itself sets no attributes on a user's optimizer. These exist only while the shim is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak import amp
from halfpeak.amp.master_groups import MasterGroups
from halfpeak.amp.properties import opt_levels
from halfpeak.amp.run import Run
from halfpeak.amp.session import _amp_state
from halfpeak.core.dtypes import is_low
from halfpeak.core.optimizer_state import params_of
from halfpeak.shim.spec import Undo

O0, O1, O2, O3, O4, O5 = (opt_levels[name] for name in ("O0", "O1", "O2", "O3", "O4", "O5"))

NAMES: Final = (
    "_amp_stash",
    "_amp_lazy_init",
    "_lazy_init_maybe_master_weights",
    "_master_params_to_model_params",
)


class AmpOptimizerState(MasterGroups):
    """The values of apex's ``optimizer._amp_stash``, read from the run that prepared the optimizer.

    Attributes:
        lazy_init_called: True from the start, because masters exist as soon as ``initialize`` returns. Scripts set it.
        already_patched: False, because a skipped step replaces no method.
        params_have_scaled_gradients: False, because every ``scale_loss`` block ends with unscaled gradients.
    """

    def __init__(self, optimizer: Optimizer, run: Run) -> None:
        super().__init__(optimizer, run.parts.pairs)
        self._run = run
        self.lazy_init_called = True
        self.already_patched = self.params_have_scaled_gradients = False

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
        parts = self._run.parts
        parts.publish(parts.window_of(self.optimizer))


@functools.wraps(amp.initialize)
def initialize(models: Any, optimizers: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Call :func:`halfpeak.amp.initialize` and give each optimizer apex's attributes, such as ``_amp_stash``."""
    result = amp.initialize(models, optimizers, *args, **kwargs)
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers or ():
        run = _amp_state.run_of(optimizer)
        if run is not None:  # with amp disabled an optimizer gets none, as in apex
            stash = AmpOptimizerState(optimizer, run)
            values = (stash, stash.initialise, stash.initialise, stash.publish)
            vars(optimizer).update(zip(NAMES, values, strict=True))
    return result


def set_up() -> Undo:
    """Record the amp handle and registrations. The returned function restores them and removes the attributes."""
    handle, registered = _amp_state.handle, dict(_amp_state.registered)

    def undo() -> None:
        for optimizer in _amp_state.optimizers():
            for name in NAMES:
                vars(optimizer).pop(name, None)
        if _amp_state.handle is not handle and _amp_state.handle is not None:
            _amp_state.handle._deactivate()
        _amp_state.registered = registered

    return undo


def _flat(groups: Sequence[list[Tensor]]) -> list[Tensor]:
    return [p for group in groups for p in group]
