"""Access to the Triton kernels without importing triton: whether it is installed, their module, and their configuration."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NamedTuple


class KernelConfig(NamedTuple):
    """Which formula a Triton kernel is compiled for; see :func:`halfpeak.ops.triton.update.update_kernel`.

    Attributes:
        rule: the formula.
        option: a variant of it.
        other: a second variant of it.
        master: bits of the weight's remainder, 0 where it has none.
        moments: the storage format of each state tensor.
        block: neighbouring elements that share a scale in 8-bit formats.
        norm: what the rule needs of each gradient before the update: nothing, sums of ``squares``, or the ``largest`` value.
        trust: whether an update is rescaled to the norm of the weight.
    """

    rule: str
    option: bool | str
    other: bool | str = False
    master: int = 0
    moments: tuple[str, str, str] = ("identity", "identity", "identity")
    block: int = 128
    norm: str = ""
    trust: bool = False


def is_installed() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def kernels() -> Any:
    """The module ``halfpeak.ops.triton.launch``, whose import takes longer than all of halfpeak's.

    Raises:
        ImportError: triton is not installed.
    """
    return importlib.import_module("halfpeak.ops.triton.launch")
