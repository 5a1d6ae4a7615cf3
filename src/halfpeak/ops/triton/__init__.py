"""Access to the Triton kernels without importing triton: whether it is installed, and the module of kernels."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def is_installed() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def kernels() -> Any:
    """The module ``halfpeak.ops.triton.launch``, whose import takes longer than all of halfpeak's.

    Raises:
        ImportError: triton is not installed.
    """
    return importlib.import_module("halfpeak.ops.triton.launch")
