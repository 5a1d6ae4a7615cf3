"""Memory for the float32 gradients of masters, kept from one step to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from sys import getrefcount
from typing import Final, NamedTuple

import torch
from torch import Tensor


class GradBufferPool:
    """Gives the gradient of a master the memory that it had in the step before, unless somebody still holds it.

    A CPU's allocator returns large tensors to the system, and touching memory that is mapped anew takes several times as
    long as what is then done with it. Small gradients of a device lie in one tensor. What is in the memory given is undefined.

    A gradient that somebody keeps (the tensor, a view, an array, another process) stays as it is: the next one gets new
    memory.

    Example:
        >>> import torch
        >>> memory, master = GradBufferPool(), torch.ones(3)
        >>> place = memory.take([master])[0].data_ptr()
        >>> kept = memory.take([master])[0]
        >>> kept.data_ptr() == place, memory.take([master])[0].data_ptr() == place
        (True, False)
    """

    def __init__(self) -> None:
        self._known: dict[int, _Gradient] = {}
        # Which is held by nobody, so that whoever has as many references is not either.
        self._free = _Gradient(torch.empty(0), _Room(torch.empty(0)), torch.empty(0))
        self._keys: list[int] = []
        self._asked: list[_Gradient] = []
        self._rooms: list[_Room] = []

    def take(self, masters: Sequence[Tensor]) -> list[Tensor]:
        """A tensor like each of ``masters``."""
        keys = list(map(id, masters))
        if keys != self._keys:
            self._look_up(keys, masters)
        held = self._held()
        if held:
            self._lay_out([(keys[index], masters[index]) for index in held])
            self._look_up(keys, masters)
        return list(map(_TENSOR, self._asked))

    def _look_up(self, keys: list[int], masters: Sequence[Tensor]) -> None:
        self._lay_out([(key, m) for key, m in zip(keys, masters, strict=True) if key not in self._known])
        self._keys = keys
        self._asked = [self._known[key] for key in keys]
        self._rooms = list({gradient.room for gradient in self._asked})

    def _held(self) -> list[int]:
        """The positions of those whose memory is not free, or that do not lie where they were laid out."""
        tensors = list(map(_TENSOR, (*self._asked, self._free)))
        *counts, free = map(getrefcount, tensors)
        shut = {room for room in self._rooms if not room.is_free()}
        if not shut and counts.count(free) == len(counts) and not any(map(_HAS_GRAPH, tensors)):
            return []
        shut.update(
            gradient.room
            for gradient, count in zip(self._asked, counts, strict=True)
            if count != free or gradient.tensor.requires_grad
        )
        return [index for index, gradient in enumerate(self._asked) if gradient.room in shut]

    def _lay_out(self, wanted: Sequence[tuple[int, Tensor]]) -> None:
        """New memory for the gradients of some masters, by ``id``."""
        large = [[pair] for pair in wanted if pair[1].numel() >= ALONE]
        small: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for pair in wanted:
            if pair[1].numel() < ALONE:
                small.setdefault(pair[1].device, []).append(pair)
        for members in [*small.values(), *large]:
            starts = [0]
            for _, master in members:
                starts.append(starts[-1] + math.ceil(master.numel() / ALIGN) * ALIGN)
            room = _Room(members[0][1].new_empty(starts[-1]))
            for (key, master), start in zip(members, starts, strict=False):
                self._known[key] = _Gradient(room.cut(master, start), room, master)
            room.close()


class _Room:
    """One piece of memory, and how many hold it if nobody else does."""

    def __init__(self, vector: Tensor) -> None:
        self._storage = vector.untyped_storage()
        self._vector = vector
        self._is_on_host = vector.is_cpu
        self.close()

    def cut(self, like: Tensor, start: int) -> Tensor:
        """A tensor of the shape of another one, with its strides where it is dense, and a version of its own."""
        strides = torch.empty_like(like, device="meta").stride()
        return self._vector.new_empty(0).set_(self._storage, start, like.shape, strides)

    def close(self) -> None:
        """Everything has been cut."""
        self._count = self._holders()

    def is_free(self) -> bool:
        """Whether nothing else lies in this memory, and nothing has left it."""
        # What a queue has carried to another process is held there, which no count here tells.
        return self._holders() == self._count and not (self._is_on_host and self._storage.is_shared())

    def _holders(self) -> tuple[int, int]:
        """Tensors, and Python's references."""
        return torch._C._storage_Use_Count(self._storage._cdata), getrefcount(self._storage)


class _Gradient(NamedTuple):
    """What is given, where it lies, and for which master: one that is held here keeps its ``id``."""

    tensor: Tensor
    room: _Room
    master: Tensor


ALONE: Final = 2**14
"""Elements from which a gradient has memory of its own."""

ALIGN: Final = 16
"""Gradients begin at a multiple of this many elements."""

_TENSOR: Final = attrgetter("tensor")
_HAS_GRAPH: Final = attrgetter("requires_grad")
