"""The eager backend on the CPU: the kernels as torch operations on chunks that fit the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from halfpeak.fused.backends.base import GradStats, HostBackend, UpdateArgs
from halfpeak.fused.backends.kernels import store
from halfpeak.fused.flat.layout import BufferSlice

CHUNK = 2**17
"""Elements per chunk: intermediate results of this size stay in the cache and in memory that the allocator keeps."""


class EagerBackend(HostBackend):
    """Updates parameters on the CPU, chunk by chunk, with torch's own fused kernel for rules that have one."""

    name = "eager"

    def __init__(self) -> None:
        super().__init__()
        self._scratch: dict[torch.dtype, Tensor] = {}

    def measure(
        self, slices: Sequence[BufferSlice], grads: Sequence[Tensor | None], multiplier: Tensor
    ) -> GradStats:
        squares: list[Tensor] = []
        found_inf = torch.zeros_like(multiplier)
        for slice_ in slices:
            vector = self._packer(slice_.buffer, grads)
            for at in _chunks(len(vector), CHUNK):
                true = self._widened(vector[at], multiplier.dtype)
                # This kernel checks each element, because a sum may overflow although all elements are finite.
                torch._amp_foreach_non_finite_check_and_unscale_([true], found_inf, multiplier)
                squares.append(torch.dot(true, true))
        return GradStats(torch.stack(squares).sum() if squares else torch.zeros_like(multiplier), found_inf)

    def update(self, updates: Sequence[UpdateArgs], grads: Sequence[Tensor | None]) -> None:
        for args in updates:
            vector = self._packer(args.slice_.buffer, grads)
            length = len(args.slice_.buffer)
            for at in _chunks(length, length if args.slice_.rule.layerwise else CHUNK):
                self._update(args, vector[at], at)

    def _update(self, args: UpdateArgs, grad: Tensor, at: slice) -> None:
        buffer, rule, wide = args.slice_.buffer, args.slice_.rule, args.numbers.dtype
        weight, low, slots = buffer.chunk(at)
        true = self._widened(grad, wide).mul_(args.numbers[0])
        constants = args.numbers[1:].unbind()
        whole, *state = rule.decode(weight, slots, wide)
        moved: Sequence[Tensor] = (whole, *state)
        if not rule.torch_fused(whole, true, state, args.group, args.slice_.step_count.step):
            moved = rule(whole, true, state, constants)
        store(rule, moved, constants, weight, low, slots)

    def _widened(self, chunk: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy in ``dtype``, valid until the next call."""
        scratch = self._scratch.get(dtype)
        if scratch is None or len(scratch) < len(chunk):
            scratch = self._scratch[dtype] = chunk.new_empty(len(chunk), dtype=dtype)
        return scratch[: len(chunk)].copy_(chunk)

    def invalidate_layout(self) -> None:
        super().invalidate_layout()
        self._scratch.clear()


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size or 1))
