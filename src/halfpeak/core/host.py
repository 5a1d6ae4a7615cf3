"""Reading scalars that lie in host memory, as memory."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch
from torch import Tensor
from torch.compiler import is_compiling

_TYPES: Final[dict[torch.dtype, Any]] = {
    torch.float32: ctypes.c_float,
    torch.int32: ctypes.c_int32,
}


def is_on_host(*scalars: Tensor) -> bool:
    """Whether :func:`read_host` can read all of them: plain float32 or int32 scalars on the CPU, not being traced."""
    return not is_compiling() and all(
        type(scalar) is Tensor
        and scalar.device.type == "cpu"
        and scalar.dim() == 0
        and scalar.dtype in _TYPES
        for scalar in scalars
    )


def read_host(scalar: Tensor) -> float | int:
    """The value of a scalar that :func:`is_on_host`. No tensor operation that could wait for a device is called.

    >>> read_host(torch.tensor(3, dtype=torch.int32))
    3
    """
    value: float | int = _TYPES[scalar.dtype].from_address(scalar.data_ptr()).value
    return value
