"""What a wrapper saves beyond the formats of others, so that a resume is bitwise, and the class that saves and loads it."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

from torch.optim import Optimizer

from halfpeak.core.state_checks import require_count, require_list, require_mapping
from halfpeak.engine.engine import Engine
from halfpeak.engine.state_checks import check_buffers, check_optimizer, check_version
from halfpeak.optim.base import BaseOptimWrapper, check_base_settings, is_torch_optimizer

RESUME_KEY: Final = "halfpeak"
"""Its key in the state of a wrapper. torch and mmengine ignore unknown keys."""

_KEYS: Final = frozenset({"version", "scalers", "window", "buffers"})
COUNT_KEY: Final = "inner_count"
"""What a wrapper adds: how many backward passes there were. Files written before have none."""

_VERSION: Final = 1


def save_resume_state(engine: Engine) -> dict[str, Any] | None:
    """Loss scalers, the open window and the batch-norm statistics from before it; waits for the device.

    None where the formats of others are complete: between two windows, unless overflows were counted that those formats
    do not hold.
    """
    scalers = [scaler.state_dict() for scaler in engine.scalers]
    has_counted = any(
        state["stuck"] or (scaler.config.hysteresis > 1 and state["grace"] != scaler.config.hysteresis)
        for scaler, state in zip(engine.scalers, scalers, strict=True)
    )
    if not (engine.is_open or has_counted):
        return None
    return {
        "version": _VERSION,
        "scalers": scalers,
        "window": engine.window_state(),
        "buffers": engine.window_buffers(),
    }


def has_open_window(saved: Mapping[str, Any]) -> bool:
    """Whether the state of a wrapper, or a part of it, holds an open window.

    Raises:
        StateError: what it holds is no window.
    """
    if RESUME_KEY not in saved:
        return False
    check_resume_format(saved[RESUME_KEY])
    window = require_mapping(saved[RESUME_KEY]["window"], "the state's window")
    lanes = require_list(window.get("lanes"), "optimizers in its window")
    return any(require_mapping(lane, "a window of the state").get("phase") != "CLEAN" for lane in lanes)


def check_resume_format(saved: object) -> None:
    """Check that this is what :func:`save_resume_state` returned.

    Raises:
        StateError: it is something else.
    """
    has_count = isinstance(saved, Mapping) and COUNT_KEY in saved
    keys = _KEYS | {COUNT_KEY} if has_count else _KEYS
    known = require_mapping(saved, f"the entry {RESUME_KEY!r} of the state", keys)
    require_count(known.get(COUNT_KEY, 0), COUNT_KEY)
    check_version(known["version"], _VERSION)
    check_buffers(known["buffers"])


def check_resume_state(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Check that :func:`load_resume_state` would load it.

    Raises:
        StateError: it would not.
    """
    check_resume_format(saved)
    scalers = require_list(saved["scalers"], "loss scales", len(engine.scalers))
    for scaler, state in zip(engine.scalers, scalers, strict=True):
        scaler.parse(state)
    engine.check_window_state(saved["window"])


def load_resume_state(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Restore what :func:`save_resume_state` returned, except the statistics. A static scale keeps its configured value.

    Raises:
        StateError: it does not fit. Nothing was loaded.
    """
    check_resume_state(engine, saved)
    engine.load_window_state(saved["window"])
    for scaler, state in zip(engine.scalers, saved["scalers"], strict=True):
        fixed = {} if scaler.config.dynamic else {"scale": scaler.read_scale()}
        scaler.load_state_dict({**state, **fixed})


class ResumableWrapper(BaseOptimWrapper):
    """The part of a wrapper that saves, loads and copies the state of its engine.

    A state may be loaded before there is an engine, or before the engine has its model. What cannot be applied yet is kept,
    and saved again unchanged.
    """

    _KEYS: ClassVar[tuple[str, ...]] = (RESUME_KEY,)
    """The keys that this class reads in a state, besides those that every wrapper reads."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._engine: Engine | None = None
        self._pending: Mapping[str, Any] = {}

    @property
    def _is_watched(self) -> bool:
        """Whether the engine takes the steps. It can of torch's optimizers; others are called as they are."""
        return is_torch_optimizer(self.optimizer)

    @abstractmethod
    def _ready(self) -> Engine:
        """The engine of the optimizer as it is now."""

    @abstractmethod
    def _set_engine(self, engine: Engine | None) -> None:
        """Set the engine of this wrapper."""

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state. Inside an accumulation window also what is open, under ``"halfpeak"``."""
        return {**super().state_dict(), **self._extra_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore what :meth:`state_dict` gave, or the state of another wrapper or of a plain optimizer.

        Gradients of an open window are dropped; those of a saved one come back.

        Raises:
            StateError: it does not fit. Nothing was loaded.
        """
        self.check_state_dict(state_dict)
        if self._engine is not None:
            self._engine.abort()
        super().load_state_dict(state_dict)
        self._pending = {key: state_dict[key] for key in self._KEYS if key in state_dict}
        if self._engine is not None:
            self._apply_pending(self._engine)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that :meth:`load_state_dict` would take it.

        Raises:
            StateError: it would not.
        """
        check_base_settings(state_dict)
        if is_torch_optimizer(self.optimizer):
            check_optimizer(self.optimizer, state_dict)
        if self._is_watched:
            self._check_state(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engine": None, "_pending": self._extra_state()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The engine first: its copy keeps optimizer, masters and the open window connected.
        engine = copy.deepcopy(self._engine, memo)
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        state = super().__getstate__()
        twin.__setstate__({name: copy.deepcopy(state[name], memo) for name in state if name != "_engine"})
        twin._set_engine(engine)
        return twin

    def _has_window(self) -> bool:
        is_open = self._engine is not None and self._engine.is_open
        return is_open or has_open_window(self._pending)

    def _extra_state(self) -> dict[str, Any]:
        """The entries of the state besides the optimizer's."""
        if self._engine is None or self._pending:
            return dict(self._pending)
        found = save_resume_state(self._engine)
        return {} if found is None else {RESUME_KEY: found}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if RESUME_KEY in state:
            check_resume_state(self._ready(), state[RESUME_KEY])

    def _apply_pending(self, engine: Engine) -> None:
        """Load into the engine what a state dict held for it."""
        if self._pending:
            self._restore(engine, self._pending)
            if RESUME_KEY in self._pending:
                load_resume_state(engine, self._pending[RESUME_KEY])
            self._put_buffers(engine)

    def _put_buffers(self, engine: Engine) -> None:
        """Statistics can be restored only once the model is known, which may be later than the rest."""
        if engine.models:
            if RESUME_KEY in self._pending:
                engine.load_window_buffers(self._pending[RESUME_KEY]["buffers"])
            self._pending = {}

    def _restore(self, engine: Engine, state: Mapping[str, Any]) -> None:
        """Load the entries in the formats of others."""
