"""What a wrapper's state holds of the engine beyond the formats of others, so that a resume is bitwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from halfpeak.core.errors import StateError
from halfpeak.engine.engine import Engine
from halfpeak.engine.state import put_window, take_window
from halfpeak.engine.state_checks import check_window

KEY: Final = "halfpeak"
"""Where it lies in the state of a wrapper. torch and mmengine ignore keys that they do not know."""

_KEYS: Final = frozenset({"version", "scalers", "window", "buffers"})
_VERSION: Final = 1


def take_exact(engine: Engine) -> dict[str, Any] | None:
    """Loss scalers, the open window and the batch-norm statistics from before it; waits for the device.

    None where the formats of others say everything: between two windows, unless overflows were counted that they do
    not know of.
    """
    scalers = [scaler.state_dict() for scaler in engine.scalers]
    has_counted = any(
        state["stuck"] or (scaler.config.hysteresis > 1 and state["grace"] != scaler.config.hysteresis)
        for scaler, state in zip(engine.scalers, scalers, strict=True)
    )
    if not (engine.has_open_window or has_counted):
        return None
    return {
        "version": _VERSION,
        "scalers": scalers,
        "window": take_window(engine),
        "buffers": engine.buffers.saved(),
    }


def has_window(saved: Mapping[str, Any]) -> bool:
    """Whether the state of a wrapper, or a part of it, holds an open window."""
    return KEY in saved and any(lane["phase"] != "CLEAN" for lane in saved[KEY]["window"]["lanes"])


def check_form(exact: object) -> None:
    """Check that this is what :func:`take_exact` gave.

    Raises:
        StateError: it is something else.
    """
    if not isinstance(exact, Mapping) or frozenset(map(str, exact)) != _KEYS or exact["version"] != _VERSION:
        raise StateError(
            f"the entry {KEY!r} of the state is of another version; save it and load it with one halfpeak"
        )


def check_exact(engine: Engine, exact: Mapping[str, Any]) -> None:
    """Check that :func:`put_exact` would fit.

    Raises:
        StateError: it would not.
    """
    check_form(exact)
    if len(exact["scalers"]) != len(engine.scalers):
        raise StateError(
            f"the state holds {len(exact['scalers'])} loss scalers, the wrapper {len(engine.scalers)}"
        )
    for scaler, state in zip(engine.scalers, exact["scalers"], strict=True):
        scaler.parse(state)
    check_window(engine, exact["window"])


def put_exact(engine: Engine, exact: Mapping[str, Any]) -> None:
    """Restore what :func:`take_exact` gave, but for the statistics. A static scale keeps its configured value.

    Raises:
        StateError: it does not fit. Nothing was loaded.
    """
    check_exact(engine, exact)
    put_window(engine, exact["window"])
    for scaler, state in zip(engine.scalers, exact["scalers"], strict=True):
        fixed = {} if scaler.config.dynamic else {"scale": scaler.read_scale()}
        scaler.load_state_dict({**state, **fixed})
