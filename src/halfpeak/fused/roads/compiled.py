"""The compiled road: the kernels through torch.compile, two calls per block whatever the number of parameters."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfpeak.fused import kernel
from halfpeak.fused.gather import Gather
from halfpeak.fused.layout import Piece
from halfpeak.fused.roads.base import Order, Reading
from halfpeak.fused.rules.base import Rule


class CompiledRoad:
    """Kernels made by torch.compile's C++ backend, once per rule and combination of dtypes.

    Sizes are dynamic and every number comes in a tensor, so neither more parameters nor another learning rate, scale,
    step or clipping factor compiles anything anew. The code is kept on disk between runs by torch's own cache.
    """

    name = "compiled"

    def __init__(self) -> None:
        self._gather = Gather()

    def measure(self, pieces: Sequence[Piece], grads: Sequence[Tensor | None], factor: Tensor) -> Reading:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        run = _measure()
        read = [
            (run if len(piece.block) > 1 else kernel.measure)(self._gather(piece.block, grads), factor)
            for piece in pieces
        ]
        squares, flags = zip(*read, strict=True)
        return Reading(torch.stack(squares).sum(), torch.stack(flags).any().float())

    def update(self, orders: Sequence[Order], grads: Sequence[Tensor | None]) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        for order in orders:
            block = order.piece.block
            run = _update(order.rule)
            if order.rule.layerwise and len(block) < 2:
                if not len(block):
                    continue
                # torch.compile would make code for one element alone.
                run = kernel.update_of(order.rule)
            run(block.weight, block.low, block.slots, self._gather(block, grads), order.numbers)

    def forget(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        self._gather.forget()

    def clear(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        self._gather.clear()


@cache
def _measure() -> Callable[..., Any]:
    return torch.compile(_own_code(kernel.measure), fullgraph=True, dynamic=True)


@cache
def _update(rule: Rule) -> Callable[..., Any]:
    return torch.compile(_own_code(kernel.update_of(rule)), fullgraph=True, dynamic=True)


def _own_code(function: Any) -> Any:
    """``function`` with a code object of its own: torch.compile counts the versions of a kernel per code object."""
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
