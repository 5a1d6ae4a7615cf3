"""The session of ``amp``: its global state in this process, and the messages that depend on it.

apex has one configuration, which a second ``initialize`` replaces while the first run is training. Here each call makes
its own :class:`~halfpeak.amp.run.Run`. The session refers weakly to optimizers and runs, so a run ends with its optimizers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from halfpeak.amp.run import Run
from halfpeak.amp.scaler import LossScaler
from halfpeak.casting.registry import CastRule, Place
from halfpeak.core.errors import ConfigError
from halfpeak.parts.found_inf import is_first_rank


class _Suspended(threading.local):
    """The number of ``amp.disable_casts()`` blocks that are open on a thread."""

    depth = 0


class AmpState:
    """The session, under the names that code written for ``apex.amp._amp_state`` reads and writes.

    Attributes:
        hard_override: print a warning instead of refusing an override that contradicts the level.
        allow_incoming_model_not_fp32: let ``initialize`` accept a model in low precision.
        verbosity: of the last ``initialize``.
        opt_properties: of the last ``initialize``, a :class:`~halfpeak.amp.properties.Properties`; None before the first.
        loss_scalers: of the last ``initialize`` that was enabled and had optimizers.
        min_loss_scale: of the last ``initialize`` that was enabled.
        max_loss_scale: of the last ``initialize`` that was enabled.
        handle: the handle of the active casts, from ``init`` or an O1 or O4 ``initialize``; or None.
        suspended: counts the open ``disable_casts()`` blocks.
        models: every live model that was initialised at O1 or O4, with the handle of its casts, and every live model
            for which amp is disabled, with None.
        registered: functions that the user registered, with their rules. They apply only to casts made later.
    """

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.opt_properties: Any = None
        self.loss_scalers: list[LossScaler] = []
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float | None = 2.0**24
        self.handle: Any = None
        self.models: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self.suspended = _Suspended()
        self.registered: dict[Place, CastRule] = {}
        self._runs: weakref.WeakKeyDictionary[Any, weakref.ref[Run] | None] = weakref.WeakKeyDictionary()

    def add(self, run: Run, optimizers: Sequence[Any]) -> None:
        """Register a run and its optimizers; the scalers of one that has optimizers become :attr:`loss_scalers`."""
        for optimizer in optimizers:
            self._runs.pop(optimizer, None)  # keeps the runs in the order of the calls
            self._runs[optimizer] = weakref.ref(run)
        if optimizers or not self.runs():  # a teacher's run scales no loss
            self.loss_scalers = run.scalers

    def add_disabled(self, optimizers: Iterable[Any]) -> None:
        """Register optimizers that were passed to ``initialize(enabled=False)``."""
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer):
                self._runs.setdefault(optimizer, None)

    def optimizers(self) -> list[Any]:
        """Every optimizer that is alive and was passed to ``initialize``."""
        return list(self._runs)

    def is_disabled(self, optimizer: object) -> bool:
        """Whether an optimizer was passed to ``initialize(enabled=False)``."""
        return optimizer in self._runs and self._runs[optimizer] is None

    def run_of(self, optimizer: object) -> Run | None:
        """The run of an optimizer; None if it has none, or amp is disabled for the optimizer."""
        is_known = optimizer in self._runs  # no get(), which refuses what cannot be referred to weakly
        reference = self._runs[optimizer] if is_known else None
        return None if reference is None else reference()

    def runs(self) -> list[Run]:
        """The runs that still have an optimizer, oldest first."""
        runs = (run() for run in self._runs.values() if run is not None)
        return list(dict.fromkeys(run for run in runs if run is not None))

    def all_scalers(self) -> list[LossScaler]:
        """The loss scalers of every live run, newest first, and then those of the last enabled ``initialize``."""
        scalers = [scaler for run in reversed(self.runs()) for scaler in run.scalers]
        return list(dict.fromkeys([*scalers, *self.loss_scalers]))

    def require_started(self) -> Any:
        """Return the properties of the last ``initialize``.

        Raises:
            ConfigError: ``initialize`` was never called.
        """
        if self.opt_properties is None:
            raise ConfigError(
                "amp.initialize has not been called; write model, optimizer = amp.initialize(model, optimizer)"
            )
        return self.opt_properties


_amp_state: Final = AmpState()
"""The session of this process."""


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print if the verbosity of the last ``initialize`` is above 0; with ``rank0``, on the first rank only."""
    if _amp_state.verbosity > 0 and (not rank0 or is_first_rank()):
        print(message)


def warn_or_err(message: str) -> None:
    """Raise ConfigError for an override that contradicts the level.

    Raises:
        ConfigError: unless ``amp._amp_state.hard_override`` is true; then the message is printed and the value accepted.
    """
    if not _amp_state.hard_override:
        raise ConfigError(message)
    print(f"Warning: {message}")
