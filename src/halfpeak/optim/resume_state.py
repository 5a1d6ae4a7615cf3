"""The entry of a wrapper's state that makes a resume bitwise: what mmengine's and torch's formats cannot hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from halfpeak.core.state_checks import require_count, require_list, require_mapping
from halfpeak.engine.engine import Engine
from halfpeak.engine.state_checks import check_buffers, check_version

RESUME_KEY: Final = "halfpeak"
"""The key of the entry. torch and mmengine ignore unknown keys."""

_KEYS: Final = frozenset({"version", "scalers", "window", "buffers"})
COUNT_KEY: Final = "inner_count"
"""The key of a wrapper's number of backward passes. Files of earlier releases lack it."""

_VERSION: Final = 1


def save_resume_state(engine: Engine) -> dict[str, Any] | None:
    """Return loss scalers, the open window and the batch-norm statistics from before it. Waits for the device.

    None if the formats of other libraries hold everything: between two windows, unless a scaler has counted overflows,
    which these formats do not hold.
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
        StateError: the window is malformed.
    """
    if RESUME_KEY not in saved:
        return False
    check_resume_format(saved[RESUME_KEY])
    window = require_mapping(saved[RESUME_KEY]["window"], "the state's window")
    lanes = require_list(window.get("lanes"), "optimizers in its window")
    return any(require_mapping(lane, "a window of the state").get("phase") != "CLEAN" for lane in lanes)


def check_resume_format(saved: object) -> None:
    """Raise StateError unless ``saved`` is what :func:`save_resume_state` returned."""
    has_count = isinstance(saved, Mapping) and COUNT_KEY in saved
    keys = _KEYS | {COUNT_KEY} if has_count else _KEYS
    known = require_mapping(saved, f"the entry {RESUME_KEY!r} of the state", keys)
    require_count(known.get(COUNT_KEY, 0), COUNT_KEY)
    check_version(known["version"], _VERSION)
    check_buffers(known["buffers"])


def check_resume_state(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Raise StateError unless :func:`load_resume_state` would load ``saved``."""
    check_resume_format(saved)
    scalers = require_list(saved["scalers"], "loss scales", len(engine.scalers))
    for scaler, state in zip(engine.scalers, scalers, strict=True):
        scaler.parse(state)
    engine.check_window_state(saved["window"])


def load_resume_state(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Restore a state from :func:`save_resume_state`, except the statistics. A static scale keeps its configured value.

    Raises:
        StateError: the state does not fit. Nothing was loaded.
    """
    check_resume_state(engine, saved)
    engine.load_window_state(saved["window"])
    for scaler, state in zip(engine.scalers, saved["scalers"], strict=True):
        fixed = {} if scaler.config.dynamic else {"scale": scaler.read_scale()}
        scaler.load_state_dict({**state, **fixed})
