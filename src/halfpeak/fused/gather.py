"""Gather: the gradients of a block as one vector."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from halfpeak.fused.blocks import Block, flat


class Gather:
    """Copies the gradients of an arena's parameters side by side into a scratch vector, one block at a time.

    The scratch is as long as the longest arena. The gradient of a parameter that is alone in its block is read where it
    lies. What was gathered last is not gathered again until :meth:`forget`.
    """

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, Tensor] = {}
        # Another set of gradients cuts other blocks.
        self._rooms: WeakKeyDictionary[Block, _Room] = WeakKeyDictionary()
        self._last: tuple[Block, Sequence[Tensor | None], Tensor] | None = None

    def __call__(self, block: Block, grads: Sequence[Tensor | None]) -> Tensor:
        """The gradients of ``block`` as a vector; see :meth:`memory`."""
        return flat(self.memory(block, grads))

    def memory(self, block: Block, grads: Sequence[Tensor | None]) -> Tensor:
        """The gradients of ``block`` as they are.

        Args:
            block: whose gradients.
            grads: of all parameters, those of the block's members among them.

        Returns:
            A dense tensor whose elements lie as the block's do; it holds until the next call.  # of the gradients' dtype
        """
        last = self._last
        if last is not None and last[0] is block and last[1] is grads:
            return last[2]
        if block.is_alone:
            return _in_order(cast(Tensor, grads[block.members[0]]), block)
        start, stop = block.members[0], block.members[-1] + 1
        is_run = stop - start == len(block.members)
        found = list(grads[start:stop]) if is_run else [grads[member] for member in block.members]
        own = cast("list[Tensor]", found)
        dtypes = set(map(_DTYPE, own))
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
        vector, views = self._room(block, dtype, own[0].device)
        if block.is_row and len(dtypes) == 1:
            # Three times as fast as copies one by one.
            torch.cat(own, out=vector)
        else:
            torch._foreach_copy_(views, own)
        self._last = (block, grads, vector)
        return vector

    def where_it_lies(self, block: Block, grads: Sequence[Tensor | None]) -> Tensor | None:
        """The gradient of a parameter that is alone, if nothing need be moved for it to lie as the parameter does."""
        if not block.is_alone:
            return None
        grad = cast(Tensor, grads[block.members[0]])
        return grad if _is_in_order(grad, block) else None

    def forget(self) -> None:
        """The gradients change from here on."""
        self._last = None

    def clear(self) -> None:
        """The blocks change from here on."""
        self._rooms.clear()
        self._scratch.clear()
        self._last = None

    def _room(self, block: Block, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        scratch = self._scratch.get(dtype)
        if scratch is None or scratch.numel() < block.length or scratch.device != device:
            scratch = self._scratch[dtype] = torch.zeros(block.length, dtype=dtype, device=device)
            self._rooms.clear()
        known = self._rooms.get(block)
        if known is None or known.dtype != dtype:
            vector = scratch[: block.length]
            known = self._rooms[block] = _Room(dtype, vector, block.views(vector))
        if block.has_gaps:
            # Between the parameters lies what other blocks have left.
            known.vector.zero_()
        return known.vector, known.views


class _Room(NamedTuple):
    """Where the gradients of a block go, together and each of them. It does not hold the block."""

    dtype: torch.dtype
    vector: Tensor
    views: list[Tensor]


_DTYPE: Final = attrgetter("dtype")


def _is_in_order(grad: Tensor, block: Block) -> bool:
    # Kernels read memory, where a lazily negated tensor lies with the other sign.
    return (grad.shape, grad.stride()) == block.shapes[0] and not grad.is_neg()


def _in_order(grad: Tensor, block: Block) -> Tensor:
    """A gradient in the order of its parameter's memory."""
    if _is_in_order(grad, block):
        return grad
    shape, stride = block.shapes[0]
    return torch.empty_strided(shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
