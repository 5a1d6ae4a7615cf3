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

from halfpeak.core.errors import OrderError

P = ParamSpec("P")
R = TypeVar("R")

_TYPES: Final[dict[torch.dtype, Any]] = {
    torch.float32: ctypes.c_float,
    torch.int32: ctypes.c_int32,
}


def host_values(*scalars: Tensor) -> list[Any] | None:
    """The values of plain float32 or int32 scalars on the CPU; None if one is something else, or being traced.

    No tensor operation that could wait for a device is called.

    >>> host_values(torch.tensor(3, dtype=torch.int32), torch.tensor(0.5))
    [3, 0.5]
    """
    if is_compiling():
        return None
    for scalar in scalars:
        if type(scalar) is not Tensor or not scalar.is_cpu or scalar.dim() or scalar.dtype not in _TYPES:
            return None
    return [_TYPES[scalar.dtype].from_address(scalar.data_ptr()).value for scalar in scalars]


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on ``device`` now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_inference_mode(call: str) -> None:
    """Refuse what makes or writes tensors that are trained later: torch would fail then, in another place.

    Raises:
        OrderError: ``call`` was called in ``torch.inference_mode()``.
    """
    if torch.is_inference_mode_enabled():
        raise OrderError(
            f"{call} was called in torch.inference_mode(), and what it would make or write there could not be trained; "
            "call it outside of it, or write torch.no_grad() instead"
        )


def single(number: float) -> float:
    """Rounded to float32.

    >>> single(0.1)
    0.10000000149011612
    """
    return ctypes.c_float(number).value


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
