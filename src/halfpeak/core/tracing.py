"""Functions that :func:`torch.compile` leaves to Python where it traces their caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Mark ``function`` as one that Python runs, with all it calls, between two compiled graphs.

    What :func:`torch.compiler.disable` does, without importing the compiler. A compiled function that it calls runs
    compiled all the same.

    >>> @untraced
    ... def double(x):
    ...     return 2 * x
    >>> double(3)
    6
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)  # type: ignore[attr-defined]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
