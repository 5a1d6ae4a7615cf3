"""The compiled road: the kernels as compiled code, two calls per block whatever the number of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from halfpeak.core.host import read_host
from halfpeak.fused.blocks import Block, flat
from halfpeak.fused.compiling import Bound, Kernel, Vector, compiled
from halfpeak.fused.gather import Gather
from halfpeak.fused.kernel import flat_update_of, measure, squares
from halfpeak.fused.layout import Piece
from halfpeak.fused.roads.base import Order, Reading
from halfpeak.fused.rules.base import Rule

CHUNK = 2**18
"""Elements at a time where a kernel needs memory for what it computes twice from: 8 bytes for each."""

SHORT = 16
"""Blocks of fewer elements are measured by torch's operations: to the compiler, quarters of them might be special."""


class CompiledRoad:
    """Kernels made by torch.compile's C++ backend, once per process, rule and combination of dtypes.

    Lengths are dynamic and every number comes in a tensor, so neither more parameters nor another learning rate, scale,
    step or clipping factor compiles anything anew. The code is kept on disk between runs by torch's own cache.
    """

    name = "compiled"

    def __init__(self) -> None:
        self._gather = Gather()
        # Another set of gradients cuts other blocks.
        self._calls: WeakKeyDictionary[Block, _Call] = WeakKeyDictionary()
        self._sums: WeakKeyDictionary[Block, _Call] = WeakKeyDictionary()

    def measure(self, pieces: Sequence[Piece], grads: Sequence[Tensor | None], factor: Tensor) -> Reading:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        sums: list[Tensor] = []
        runs: list[Callable[[], None]] = []
        for piece in pieces:
            grad = self._gather.where_it_lies(piece.block, grads)
            is_whole = piece.block.length >= SHORT and not piece.block.length % 4
            bound = self._sum(piece.block, grad, factor).bound if grad is not None and is_whole else None
            if grad is None or bound is None:
                sums += self._squares(piece.block, grads, factor)
            else:
                runs += bound.ready(grad, factor)
                sums += bound.outputs
        # Kernels leave nothing of Python in the cache: what they are given has been laid out before the first.
        for run in runs:
            run()
        total = torch.stack(sums).sum() if sums else torch.zeros_like(factor)
        found_inf = torch.zeros_like(total)
        # A sum is not finite if anything in it is not, but also where finite numbers are too many or too large.
        if not math.isfinite(read_host(total)):
            bad = [measure(self._gather(piece.block, grads), factor)[1] for piece in pieces]
            found_inf.copy_(torch.stack(bad).any())
        return Reading(total, found_inf)

    def update(self, orders: Sequence[Order], grads: Sequence[Tensor | None]) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        runs = [run for order in orders for run in self._moves(order, grads)]
        for run in runs:
            run()

    def forget(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        self._gather.forget()

    def clear(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.Road`."""
        self._gather.clear()
        self._calls.clear()
        self._sums.clear()

    def _squares(self, block: Block, grads: Sequence[Tensor | None], factor: Tensor) -> Iterator[Tensor]:
        """Sums of squares that make up that of a block."""
        grad = self._gather.memory(block, grads)
        if block.length >= SHORT:
            yield self._sum(block, grad, factor)(grad, factor)[0]
        rest = block.length % 4 if block.length >= SHORT else block.length
        if rest:
            yield measure(flat(grad)[-rest:], factor)[0]

    def _sum(self, block: Block, grad: Tensor, factor: Tensor) -> _Run:
        known = self._sums.get(block)
        if known is None or known.grad != grad.dtype:
            kernel = _measuring(grad.dtype, grad.device)
            run = _Run(None, kernel, kernel.bind(flat(grad), factor), ())
            known = self._sums[block] = _Call(grad.dtype, [run])
        return known.runs[0]

    def _moves(self, order: Order, grads: Sequence[Tensor | None]) -> Iterator[Callable[[], object]]:
        """What moves one block."""
        grad = self._gather.where_it_lies(order.piece.block, grads)
        if grad is None:
            yield partial(self._move, order, grads)
            return
        for run in self._call(order, grad).runs:
            if run.bound is None:
                yield partial(run, grad, order.numbers)
            else:
                yield from run.bound.ready(grad, order.numbers)

    def _move(self, order: Order, grads: Sequence[Tensor | None]) -> None:
        """Move a block whose gradients must be gathered, into memory that the next block's will take."""
        grad = self._gather.memory(order.piece.block, grads)
        for run in self._call(order, grad).runs:
            run(grad, order.numbers)

    def _call(self, order: Order, grad: Tensor) -> _Call:
        block = order.piece.block
        known = self._calls.get(block)
        if known is None or known.grad != grad.dtype:
            known = self._calls[block] = _Call(grad.dtype, _runs_of(order, flat(grad)))
        return known


class _Run(NamedTuple):
    """One call of a kernel: on which elements of the gradient, or None for all; and the memory it moves."""

    at: slice | None
    kernel: Callable[..., Sequence[Tensor]]
    bound: Bound | None
    memory: tuple[Tensor, ...]

    def __call__(self, grad: Tensor, numbers: Tensor) -> Sequence[Tensor]:
        if self.bound is not None:
            return self.bound(grad, numbers)
        vector = flat(grad)
        return self.kernel(*self.memory, vector if self.at is None else vector[self.at], numbers)


class _Call(NamedTuple):
    """What is the same in every step of a block. It does not hold the block."""

    grad: torch.dtype
    runs: list[_Run]


def _runs_of(order: Order, grad: Tensor) -> list[_Run]:
    block = order.piece.block
    if not block.grains or block.length <= CHUNK:
        memory = (block.weight, *_lows(block), *block.slots)
        kernel = _kernel_for(order, block, grad)
        bound = kernel.bind(*memory, grad, order.numbers) if isinstance(kernel, Kernel) else None
        return [_Run(None, kernel, bound, memory)]
    runs: list[_Run] = []
    for start in range(0, block.length, CHUNK):
        at = slice(start, min(start + CHUNK, block.length))
        weight, low, slots = block.chunk(at)
        part = replace(block, weight=weight, low=low, slots=tuple(slots))
        runs.append(_Run(at, _kernel_for(order, part, grad[at]), None, (weight, *_lows(part), *slots)))
    return runs


def _lows(block: Block) -> tuple[Tensor, ...]:
    return () if block.low is None else (block.low,)


def _kernel_for(order: Order, block: Block, grad: Tensor) -> Callable[..., Sequence[Tensor]]:
    lows = _lows(block)
    if block.length < 2:
        return flat_update_of(order.rule, has_low=bool(lows))
    full = len(block.slots) - block.scalars
    slots = zip(block.slots[:full], block.grains or (1,) * full, strict=False)
    vectors = (
        *map(Vector.long, (block.weight, *lows)),
        *(Vector.long(slot, grain) for slot, grain in slots),
        *map(Vector.fixed, block.slots[full:]),
        Vector.long(grad),
        Vector.fixed(order.numbers),
    )
    return _updating(order.rule, bool(lows), vectors)


@cache
def _measuring(dtype: torch.dtype, device: torch.device) -> Kernel:
    return compiled(squares, (Vector(dtype, device, None), Vector(torch.float32, device, ())))


@cache
def _updating(rule: Rule, has_low: bool, vectors: tuple[Vector, ...]) -> Kernel:
    return compiled(flat_update_of(rule, has_low=has_low), vectors)
