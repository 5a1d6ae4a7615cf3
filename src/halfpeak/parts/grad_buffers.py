"""A pool of memory for the float32 gradients of masters, reused in every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from sys import getrefcount
from typing import Final, NamedTuple

import torch
from torch import Tensor


class GradBufferPool:
    """Gives the gradient of a master the memory that it had in the step before, unless that memory is still in use.

    The CPU allocator returns large tensors to the system, and the first access to newly mapped memory takes several times as
    long as the arithmetic on it. Small gradients of a device share one buffer. The values in the memory are undefined.

    A gradient that other code keeps (the tensor, a view, an array, another process) is not overwritten: the next gradient
    gets new memory.

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
        # Only this pool holds this gradient. A gradient with more references than this one is still in use.
        self._unused = _Gradient(torch.empty(0), _Buffer(torch.empty(0)), torch.empty(0))
        self._keys: list[int] = []
        self._given: list[_Gradient] = []
        self._buffers: list[_Buffer] = []

    def take(self, masters: Sequence[Tensor]) -> list[Tensor]:
        """Memory for the gradient of each master: a tensor of its shape, with undefined values."""
        keys = list(map(id, masters))
        if keys != self._keys:
            self._look_up(keys, masters)
        held = self._held()
        if held:
            self._allocate([(keys[index], masters[index]) for index in held])
            self._look_up(keys, masters)
        return list(map(_TENSOR, self._given))

    def _look_up(self, keys: list[int], masters: Sequence[Tensor]) -> None:
        self._allocate([(key, m) for key, m in zip(keys, masters, strict=True) if key not in self._known])
        self._keys = keys
        self._given = [self._known[key] for key in keys]
        self._buffers = list({gradient.buffer for gradient in self._given})

    def _held(self) -> list[int]:
        """The positions of the gradients whose memory is in use, or that are part of a graph."""
        tensors = list(map(_TENSOR, (*self._given, self._unused)))
        *counts, free = map(getrefcount, tensors)
        in_use = {buffer for buffer in self._buffers if not buffer.is_free()}
        if not in_use and counts.count(free) == len(counts) and not any(map(_HAS_GRAPH, tensors)):
            return []
        in_use.update(
            gradient.buffer
            for gradient, count in zip(self._given, counts, strict=True)
            if count != free or gradient.tensor.requires_grad
        )
        return [index for index, gradient in enumerate(self._given) if gradient.buffer in in_use]

    def _allocate(self, wanted: Sequence[tuple[int, Tensor]]) -> None:
        """Allocate memory for the gradients of some masters, given as pairs (``id``, master)."""
        large = [[pair] for pair in wanted if pair[1].numel() >= MIN_STANDALONE]
        small: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for pair in wanted:
            if pair[1].numel() < MIN_STANDALONE:
                small.setdefault(pair[1].device, []).append(pair)
        for members in [*small.values(), *large]:
            starts = [0]
            for _, master in members:
                starts.append(starts[-1] + math.ceil(master.numel() / ALIGN) * ALIGN)
            buffer = _Buffer(members[0][1].new_empty(starts[-1]))
            for (key, master), start in zip(members, starts, strict=False):
                self._known[key] = _Gradient(buffer.tensor_like(master, start), buffer, master)
            buffer.count_users()


class _Buffer:
    """One piece of memory, and the number of its users when only the pool holds it."""

    def __init__(self, vector: Tensor) -> None:
        self._storage = vector.untyped_storage()
        self._vector = vector
        self._is_on_host = vector.is_cpu
        self.count_users()

    def tensor_like(self, like: Tensor, start: int) -> Tensor:
        """A tensor in this memory with the shape of ``like``, its strides if it is dense, and its own version counter."""
        strides = torch.empty_like(like, device="meta").stride()
        return self._vector.new_empty(0).set_(self._storage, start, like.shape, strides)

    def count_users(self) -> None:
        """Store the number of users after all gradients in this memory were made, when only the pool holds them."""
        self._count = self._users()

    def is_free(self) -> bool:
        """Whether only the pool uses this memory."""
        # Another process may use a tensor that a queue has sent it, which no count in this process shows.
        return self._users() == self._count and not (self._is_on_host and self._storage.is_shared())

    def _users(self) -> tuple[int, int]:
        """The number of tensors on the storage, and of Python references to it."""
        return torch._C._storage_Use_Count(self._storage._cdata), getrefcount(self._storage)


class _Gradient(NamedTuple):
    """A gradient, its buffer, and its master, which stays alive so that no other object gets its ``id``."""

    tensor: Tensor
    buffer: _Buffer
    master: Tensor


MIN_STANDALONE: Final = 2**14
"""The number of elements from which a gradient has its own buffer."""

ALIGN: Final = 16
"""Gradients begin at a multiple of this many elements."""

_TENSOR: Final = attrgetter("tensor")
_HAS_GRAPH: Final = attrgetter("requires_grad")
