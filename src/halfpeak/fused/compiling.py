"""Compiling a function of vectors once, for vectors of every length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LENGTH = 4099
"""Of the vectors that a kernel is made with: like no other length of its arguments, so none is taken for it."""

Kernel = Callable[..., Any]


def compiled(function: Callable[..., Any], arguments: Sequence[Tensor], length: int) -> Kernel:
    """``function`` as one kernel that serves every length.

    The graph is traced with symbolic lengths and compiled ahead of the first call, so a call checks nothing but goes
    straight to the code: 5 us where ``torch.compile`` takes 20, which counts when a step is many calls.

    Args:
        function: of tensors, returning a tuple of tensors; it may write its arguments.
        arguments: of a call. What counts is their dtypes, devices, and which of them are ``length`` long.
        length: more than 1, since lengths of 0 and 1 are special to the compiler.
    """
    # Not at the top: it takes longer to import than all of halfpeak.
    import torch._inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    example: list[Any] = [_stand_in(argument, length) for argument in arguments]
    # A context of the caller's, such as a mode that casts, is not to be traced into a kernel that others use as well.
    with torch.no_grad(), torch._C.DisableTorchFunction():
        # Through a lambda: annotations of the function would get into the graph and keep it out of the cache on disk.
        graph = make_fx(lambda *vectors: function(*vectors), tracing_mode="symbolic")(*example)
        return torch._inductor.standalone_compile(graph, example, dynamic_shapes="from_graph")


def _stand_in(argument: Tensor, length: int) -> Tensor:
    shape = (LENGTH,) if argument.shape == (length,) else argument.shape
    return torch.zeros(shape, dtype=argument.dtype, device=argument.device)
