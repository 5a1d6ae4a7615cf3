"""What :func:`torch.compile` does with functions of this package: it can be told so without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

P = ParamSpec("P")
R = TypeVar("R")


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
