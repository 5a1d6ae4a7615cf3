"""The former name of :mod:`halfpeak.checkpoint.scaler_states`, for scripts that still import it."""

from __future__ import annotations

import warnings
from typing import Any

from halfpeak.checkpoint import scaler_states


def __getattr__(name: str) -> Any:
    value = getattr(scaler_states, name)
    message = "halfpeak.checkpoint.foreign is called halfpeak.checkpoint.scaler_states now"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return value
