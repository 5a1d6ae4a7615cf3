"""The eager road: the kernels as torch operations, a cache's worth of elements at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from halfpeak.fused.gather import Gather
from halfpeak.fused.kernel import measure, update_of
from halfpeak.fused.layout import Piece
from halfpeak.fused.roads.base import Order, Reading

CHUNK = 2**17
"""Elements at a time: their intermediate results stay in the cache and in memory that the allocator keeps."""


class EagerRoad:
    """Runs everywhere, with torch's own fused kernel for a chunk where there is one."""

    name = "eager"

    def __init__(self) -> None:
        self._gather = Gather()

    def measure(self, pieces: Sequence[Piece], grads: Sequence[Tensor | None], factor: Tensor) -> Reading:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        squares: list[Tensor] = []
        flags: list[Tensor] = []
        for piece in pieces:
            vector = self._gather(piece.block, grads)
            for chunk in vector.split(CHUNK):
                total, flag = measure(chunk, factor)
                squares.append(total)
                flags.append(flag)
        return Reading(torch.stack(squares).sum(), torch.stack(flags).any().float())

    def update(self, orders: Sequence[Order], grads: Sequence[Tensor | None]) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        for order in orders:
            vector = self._gather(order.piece.block, grads)
            length = len(order.piece.block)
            for at in _chunks(length, length if order.rule.layerwise else CHUNK):
                _update_chunk(order, vector, at)

    def forget(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        self._gather.forget()

    def clear(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        self._gather.clear()


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size or 1))


def _update_chunk(order: Order, vector: Tensor, at: slice) -> None:
    block, rule = order.piece.block, order.rule
    weight, slots = block.weight[at], [slot[at] for slot in block.slots]
    low = None if block.low is None else block.low[at]
    grad = vector[at].to(order.numbers.dtype) * order.numbers[0]
    same = weight.dtype == grad.dtype and all(slot.dtype == grad.dtype for slot in slots)
    if same and rule.fused(weight, grad, slots, order.group, order.piece.counter.step):
        if low is not None:
            low.copy_(weight)
        return
    update_of(rule)(weight, low, slots, vector[at], order.numbers)
