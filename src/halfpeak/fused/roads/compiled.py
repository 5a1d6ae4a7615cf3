"""The compiled road: the kernels as compiled code, two calls per block whatever the number of parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfpeak.fused import kernel
from halfpeak.fused.compiling import Kernel, compiled
from halfpeak.fused.gather import Gather
from halfpeak.fused.layout import Piece
from halfpeak.fused.roads.base import Order, Reading


class CompiledRoad:
    """Kernels made by torch.compile's C++ backend, once per rule and combination of dtypes.

    Lengths are dynamic and every number comes in a tensor, so neither more parameters nor another learning rate, scale,
    step or clipping factor compiles anything anew. The code is kept on disk between runs by torch's own cache.
    """

    name = "compiled"

    def __init__(self) -> None:
        self._gather = Gather()
        self._kernels: dict[Hashable, Kernel] = {}

    def measure(self, pieces: Sequence[Piece], grads: Sequence[Tensor | None], factor: Tensor) -> Reading:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        read = [
            self._run(kernel.measure, "measure", [self._gather(piece.block, grads), factor])
            for piece in pieces
        ]
        if len(read) == 1:
            return Reading(read[0][0], read[0][1].float())
        squares, flags = zip(*read, strict=True)
        return Reading(torch.stack(squares).sum(), torch.stack(flags).any().float())

    def update(self, orders: Sequence[Order], grads: Sequence[Tensor | None]) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        for order in orders:
            block = order.piece.block
            lows = () if block.low is None else (block.low,)
            vectors = (block.weight, *lows, *block.slots, self._gather(block, grads), order.numbers)
            self._run(kernel.flat_update_of(order.rule, has_low=bool(lows)), order.rule, vectors)

    def forget(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        self._gather.forget()

    def clear(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        self._gather.clear()

    def _run(self, function: Callable[..., Any], name: Hashable, vectors: Sequence[Tensor]) -> Any:
        length = len(vectors[0])
        if length < 2:
            return function(*vectors)
        key = (name, *[vector.dtype for vector in vectors])
        known = self._kernels.get(key)
        if known is None:
            known = self._kernels[key] = compiled(function, vectors, length)
        return known(*vectors)
