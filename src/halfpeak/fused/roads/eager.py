"""The eager road: the kernels as torch operations, a cache's worth of elements at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from halfpeak.fused.gather import Gather
from halfpeak.fused.kernel import store
from halfpeak.fused.layout import Piece
from halfpeak.fused.roads.base import Order, Reading

CHUNK = 2**17
"""Elements at a time: their intermediate results stay in the cache and in memory that the allocator keeps."""


class EagerRoad:
    """Runs everywhere, with torch's own fused kernel for a chunk where there is one."""

    name = "eager"

    def __init__(self) -> None:
        self._gather = Gather()
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def measure(self, pieces: Sequence[Piece], grads: Sequence[Tensor | None], factor: Tensor) -> Reading:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        squares: list[Tensor] = []
        found_inf = torch.zeros_like(factor)
        for piece in pieces:
            vector = self._gather(piece.block, grads)
            for at in _chunks(len(vector), CHUNK):
                true = self._widened(vector[at], factor.dtype)
                # One kernel multiplies and looks for what is not finite; of the sum alone it could not be told.
                torch._amp_foreach_non_finite_check_and_unscale_([true], found_inf, factor)
                squares.append(torch.dot(true, true))
        return Reading(torch.stack(squares).sum() if squares else torch.zeros_like(factor), found_inf)

    def update(self, orders: Sequence[Order], grads: Sequence[Tensor | None]) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        for order in orders:
            vector = self._gather(order.piece.block, grads)
            length = len(order.piece.block)
            for at in _chunks(length, length if order.rule.layerwise else CHUNK):
                self._update(order, vector[at], at)

    def _update(self, order: Order, grad: Tensor, at: slice) -> None:
        block, rule, wide = order.piece.block, order.rule, order.numbers.dtype
        weight, low, slots = block.chunk(at)
        true = self._widened(grad, wide).mul_(order.numbers[0])
        constants = order.numbers[1:].unbind()
        whole, *state = rule.read(weight, slots, wide)
        moved: Sequence[Tensor] = (whole, *state)
        if not rule.fused(whole, true, state, order.group, order.piece.counter.step):
            moved = rule(whole, true, state, constants)
        store(rule, moved, constants, weight, low, slots)

    def _widened(self, chunk: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy in ``dtype``, valid until the next."""
        scratch = self._scratch.get((dtype, chunk.device))
        if scratch is None or len(scratch) < len(chunk):
            scratch = self._scratch[dtype, chunk.device] = chunk.new_empty(len(chunk), dtype=dtype)
        return scratch[: len(chunk)].copy_(chunk)

    def forget(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        self._gather.forget()

    def clear(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        self._gather.clear()
        self._scratch.clear()


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size or 1))
