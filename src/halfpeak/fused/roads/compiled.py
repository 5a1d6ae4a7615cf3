"""The compiled road: the kernels as compiled code, two calls per block whatever the number of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from halfpeak.fused.blocks import Block
from halfpeak.fused.compiling import Kernel, Vector, compiled
from halfpeak.fused.gather import Gather
from halfpeak.fused.kernel import flat_update_of, measure
from halfpeak.fused.layout import Piece
from halfpeak.fused.roads.base import Order, Reading
from halfpeak.fused.rules.base import Rule

CHUNK = 2**18
"""Elements at a time where a kernel needs memory for what it computes twice from: 8 bytes for each."""


class CompiledRoad:
    """Kernels made by torch.compile's C++ backend, once per process, rule and combination of dtypes.

    Lengths are dynamic and every number comes in a tensor, so neither more parameters nor another learning rate, scale,
    step or clipping factor compiles anything anew. The code is kept on disk between runs by torch's own cache.
    """

    name = "compiled"

    def __init__(self) -> None:
        self._gather = Gather()
        self._calls: dict[int, _Call] = {}

    def measure(self, pieces: Sequence[Piece], grads: Sequence[Tensor | None], factor: Tensor) -> Reading:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        read: list[tuple[Tensor, Tensor]] = []
        for piece in pieces:
            vector = self._gather(piece.block, grads)
            kernel = _measuring(vector.dtype, vector.device) if piece.block.length > 1 else measure
            read.append(kernel(vector, factor))
        if len(read) == 1:
            return Reading(read[0][0], read[0][1].float())
        squares, flags = zip(*read, strict=True)
        return Reading(torch.stack(squares).sum(), torch.stack(flags).any().float())

    def update(self, orders: Sequence[Order], grads: Sequence[Tensor | None]) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        for order in orders:
            vector = self._gather(order.piece.block, grads)
            for run in self._call(order, vector).runs:
                grad = vector if run.at is None else vector[run.at]
                run.kernel(*run.memory, grad, order.numbers)

    def forget(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        self._gather.forget()

    def clear(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        self._gather.clear()
        self._calls.clear()

    def _call(self, order: Order, grad: Tensor) -> _Call:
        block = order.piece.block
        known = self._calls.get(id(block))
        if known is None or known.block is not block or known.grad != grad.dtype:
            known = self._calls[id(block)] = _Call(block, grad.dtype, _runs_of(order, grad))
        return known


class _Run(NamedTuple):
    """One call of a kernel: on which elements, or None for all."""

    at: slice | None
    kernel: Kernel
    memory: tuple[Tensor, ...]


class _Call(NamedTuple):
    """What is the same in every step of a block."""

    block: Block
    grad: torch.dtype
    runs: list[_Run]


def _runs_of(order: Order, grad: Tensor) -> list[_Run]:
    block = order.piece.block
    if not block.grains or block.length <= CHUNK:
        return [_Run(None, _kernel_for(order, block, grad), (block.weight, *_lows(block), *block.slots))]
    runs: list[_Run] = []
    for start in range(0, block.length, CHUNK):
        at = slice(start, min(start + CHUNK, block.length))
        weight, low, slots = block.chunk(at)
        part = replace(block, weight=weight, low=low, slots=tuple(slots))
        runs.append(_Run(at, _kernel_for(order, part, grad[at]), (weight, *_lows(part), *slots)))
    return runs


def _lows(block: Block) -> tuple[Tensor, ...]:
    return () if block.low is None else (block.low,)


def _kernel_for(order: Order, block: Block, grad: Tensor) -> Kernel:
    lows = _lows(block)
    if block.length < 2:
        return flat_update_of(order.rule, has_low=bool(lows))
    grains = (1, *(1 for _ in lows), *(block.grains or (1 for _ in block.slots)), 1, 1)
    vectors = (block.weight, *lows, *block.slots, grad, order.numbers)
    described = [Vector.like(v, block.length, g) for v, g in zip(vectors, grains, strict=True)]
    return _updating(order.rule, bool(lows), tuple(described))


@cache
def _measuring(dtype: torch.dtype, device: torch.device) -> Kernel:
    return compiled(measure, (Vector(dtype, device, None), Vector(torch.float32, device, ())))


@cache
def _updating(rule: Rule, has_low: bool, vectors: tuple[Vector, ...]) -> Kernel:
    return compiled(flat_update_of(rule, has_low=has_low), vectors)
