"""The door to the Triton kernels: whether they can be had, and the module that holds them. Triton is imported here only."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def is_installed() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def kernels() -> Any:
    """The module ``halfpeak.ops.triton.step``, whose import takes longer than all of halfpeak's.

    Raises:
        ImportError: triton is not installed.
    """
    return importlib.import_module("halfpeak.ops.triton.step")
