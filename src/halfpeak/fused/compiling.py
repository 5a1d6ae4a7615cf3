"""Compiling a function of vectors once, for vectors of every length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LENGTH = 4099
"""Of the vectors that a kernel is made with: like no other length of its arguments, so none is taken for it."""

Kernel = Callable[..., Any]


class Vector(NamedTuple):
    """An argument of a kernel.

    Attributes:
        dtype: of its elements.
        device: where it lies.
        shape: None for a vector of any length; what else a kernel is given has the same shape in every call.
        grain: elements of the longest vectors for each of this one's.
    """

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...] | None
    grain: int = 1

    @classmethod
    def like(cls, tensor: Tensor, length: int, grain: int = 1) -> Vector:
        """The description of an argument, in a call whose vectors are ``length`` long."""
        shape = tuple(tensor.shape)
        is_long = grain > 1 or shape == (length,)
        return cls(tensor.dtype, tensor.device, None if is_long else shape, grain)


def compiled(function: Callable[..., Any], arguments: Sequence[Vector]) -> Kernel:
    """``function`` as one kernel that serves every length but 0 and 1, which are special to the compiler.

    The graph is traced with symbolic lengths and compiled ahead of the first call, so a call checks nothing but goes
    straight to the code: 5 us where ``torch.compile`` takes 20, which counts when a step is many calls.

    Args:
        function: of tensors, returning a tuple of tensors; it may write its arguments.
        arguments: what it is called with.
    """
    # Not at the top: it takes longer to import than all of halfpeak.
    import torch._inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    example: list[Any] = [_stand_in(argument) for argument in arguments]
    # A context of the caller's, such as a mode that casts, is not to be traced into a kernel that others use as well.
    with torch.no_grad(), torch._C.DisableTorchFunction():
        # Through a lambda: annotations of the function would get into the graph and keep it out of the cache on disk.
        graph = make_fx(lambda *vectors: function(*vectors), tracing_mode="symbolic")(*example)
        return torch._inductor.standalone_compile(graph, example, dynamic_shapes="from_graph")


def _stand_in(argument: Vector) -> Tensor:
    shape = (-(-LENGTH // argument.grain),) if argument.shape is None else argument.shape
    return torch.zeros(shape, dtype=argument.dtype, device=argument.device)
