"""Names of floating dtypes, and which dtypes are low-precision (in short: low)."""

from __future__ import annotations

from typing import Final

import torch

from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr

LOW: Final = frozenset({torch.float16, torch.bfloat16})
"""The dtypes that halfpeak calls low: 16-bit floating point."""

NAMES: Final[dict[str, torch.dtype]] = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "float64": torch.float64,
    "fp64": torch.float64,
    "double": torch.float64,
}


def parse_dtype(value: torch.dtype | str) -> torch.dtype:
    """Turn a dtype or one of its names into the dtype.

    A ``torch.`` prefix is allowed, so ``str(dtype)`` parses back.

    Raises:
        ConfigError: the name is unknown, or the dtype is not floating point.

    >>> parse_dtype("bf16")
    torch.bfloat16
    >>> parse_dtype("torch.float16")
    torch.float16
    """
    if isinstance(value, torch.dtype):
        dtype = value
    else:
        found = NAMES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
        if found is None:
            raise ConfigError(
                f"unknown dtype {short_repr(value)}; write one of {', '.join(NAMES)} or a torch dtype"
            )
        dtype = found
    if not dtype.is_floating_point:
        raise ConfigError(f"{dtype} is not a floating-point dtype; write one of {', '.join(NAMES)}")
    return dtype


def is_low(tensor: torch.Tensor) -> bool:
    """Whether a tensor is stored in float16 or bfloat16."""
    return tensor.dtype in LOW


def largest(dtype: torch.dtype) -> float:
    """The largest finite value of a floating dtype.

    >>> largest(torch.float16)
    65504.0
    """
    return torch.finfo(dtype).max
