"""What halfpeak uses of torch's private parts below the tensors: host memory read as memory, and marks for the compiler.

The compiler's marks are set without importing the compiler, which takes seconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.compiler import is_compiling

P = ParamSpec("P")
R = TypeVar("R")

_TYPES: Final[dict[torch.dtype, Any]] = {
    torch.float32: ctypes.c_float,
    torch.int32: ctypes.c_int32,
}


def is_on_host(*scalars: Tensor) -> bool:
    """Whether :func:`read_host` can read all of them: plain float32 or int32 scalars on the CPU, not being traced."""
    if is_compiling():
        return False
    for scalar in scalars:
        if type(scalar) is not Tensor or not scalar.is_cpu or scalar.dim() or scalar.dtype not in _TYPES:
            return False
    return True


def read_host(scalar: Tensor) -> float | int:
    """The value of a scalar that :func:`is_on_host`. No tensor operation that could wait for a device is called.

    >>> read_host(torch.tensor(3, dtype=torch.int32))
    3
    """
    value: float | int = _TYPES[scalar.dtype].from_address(scalar.data_ptr()).value
    return value


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Mark ``function`` as one that Python runs, with all it calls, between two compiled graphs.

    What :func:`torch.compiler.disable` does. A compiled function that it calls runs compiled all the same.

    >>> @untraced
    ... def double(x):
    ...     return 2 * x
    >>> double(3)
    6
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return traced_inline(function)


def traced_inline(function: Callable[P, R]) -> Callable[P, R]:
    """Mark ``function`` as one that is traced as a part of its caller only.

    Where Python calls it after a graph break, the compiler would otherwise try to compile it by itself.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)  # type: ignore[attr-defined]
    return function
