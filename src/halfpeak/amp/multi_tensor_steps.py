"""Deprecated module: the optimizer steps of ``amp_C`` are in :mod:`halfpeak.amp.multi_tensor` now."""

from __future__ import annotations

import warnings
from typing import Any

from halfpeak.amp import multi_tensor


def __getattr__(name: str) -> Any:
    if name.startswith("__") or not hasattr(multi_tensor, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__} is deprecated; write from halfpeak.amp.multi_tensor import {name}",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(multi_tensor, name)
