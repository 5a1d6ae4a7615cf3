"""Flat buffers: one-dimensional memory of several parameters, on which one kernel of a fused optimizer works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MIN_STANDALONE = 2**16
"""A parameter of this many elements or more is a buffer by itself and keeps its own memory."""

MAX_BUCKET = 2**19
"""Smaller ones are joined in buckets of at most this many elements, so that a packed gradient stays in the cache."""

ALIGN = 16
"""Parameters begin at a multiple of this many elements, so that vector loads are aligned in every dtype."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class FlatBuffer:
    """Parameters in one piece of memory: every tensor is one-dimensional, and all have the same length.

    Attributes:
        weight: what the rule updates: float32, or a low-precision weight without a master.  # [n]
        low: the model's weight, written with it; None if they are the same.                # f16[n] or bf16[n]
        states: the rule's state: f32[n] each, or as ``block_sizes`` says; the last ``per_param_scalars`` are f32[members].
        members: indices of the parameters in the order of their groups.
        spans: start and end of each of them.
        shapes: the shape and the stride of each.
        per_param_scalars: how many of the states hold one number per parameter.
        block_sizes: elements of the weight for each element of a state tensor; empty if all are 1.
        length: of the vectors.
        is_alone: whether this is all of one parameter, whose gradient can be read in place.
        has_gaps: whether there is padding between the parameters.
        is_row: whether its parameters are vectors, one after the other without gaps.
    """

    weight: Tensor
    low: Tensor | None
    states: tuple[Tensor, ...]
    members: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    per_param_scalars: int = 0
    block_sizes: tuple[int, ...] = ()
    length: int = field(init=False)
    is_alone: bool = field(init=False)
    has_gaps: bool = field(init=False)
    is_row: bool = field(init=False)

    def __post_init__(self) -> None:
        length = self.weight.numel()
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "is_alone", self.spans == ((0, length),))
        object.__setattr__(self, "has_gaps", sum(stop - start for start, stop in self.spans) < length)
        are_vectors = all(len(shape) == 1 for shape, _ in self.shapes)
        object.__setattr__(self, "is_row", are_vectors and not self.has_gaps)

    def __len__(self) -> int:
        return self.length

    def part(self, first: int, last: int) -> FlatBuffer:
        """The block of the members ``first`` to ``last - 1`` alone, over the same memory."""
        if (first, last) == (0, len(self.members)):
            return self
        start, stop = self.spans[first][0], self.spans[last - 1][1]
        weight, low, slots = self.chunk(slice(start, stop))
        full = len(slots) - self.per_param_scalars
        return FlatBuffer(
            weight=weight,
            low=low,
            states=(*slots[:full], *(slot[first:last] for slot in self.states[full:])),
            members=self.members[first:last],
            spans=tuple((a - start, b - start) for a, b in self.spans[first:last]),
            shapes=self.shapes[first:last],
            per_param_scalars=self.per_param_scalars,
            block_sizes=self.block_sizes,
        )

    def chunk(self, at: slice) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Weight, low weight and slots of some neighbours, which begin at a multiple of every block_size."""
        low = None if self.low is None else self.low[at]
        block_sizes = self.block_sizes or (1,) * len(self.states)
        slots = zip(self.states, block_sizes, strict=True)
        return self.weight[at], low, [slot[at.start // g : -(-at.stop // g)] for slot, g in slots]

    def views(self, vector: Tensor, block_size: int = 1) -> list[Tensor]:
        """``vector``, of this buffer's length or more, seen as tensors of the members' shapes and strides.

        With a block_size it has one element for that many, and is seen as vectors.
        """
        if block_size > 1:
            return [vector[start // block_size : -(-stop // block_size)] for start, stop in self.spans]
        offset = vector.storage_offset()
        return [
            vector.as_strided(shape, stride, offset + start)
            for (start, _), (shape, stride) in zip(self.spans, self.shapes, strict=True)
        ]


def flat(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as a vector, in the order in which it lies."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def buckets_of(sizes: Sequence[int], align: int = ALIGN) -> Iterator[list[int]]:
    """Indices of ``sizes`` in runs that share a bucket, the large ones alone.

    >>> list(buckets_of([MIN_STANDALONE - 1, MIN_STANDALONE, *[MIN_STANDALONE - 1] * 8, 4]))
    [[1], [0, 2, 3, 4, 5, 6, 7, 8], [9, 10]]
    """
    run: list[int] = []
    room = MAX_BUCKET
    for index, size in enumerate(sizes):
        if size >= MIN_STANDALONE:
            yield [index]
            continue
        if run and padded(size, align) > room:
            yield run
            run, room = [], MAX_BUCKET
        run.append(index)
        room -= padded(size, align)
    if run:
        yield run


def shares_storage(tensors: Sequence[Tensor]) -> set[int]:
    """The ``id`` of tensors whose memory is somebody else's, too: another tensor's, or another process's.

    >>> import torch
    >>> first, second, third = torch.zeros(6).split(2)
    >>> len(shares_storage([first, second, third])), len(shares_storage([first, second, second.view(1, 2)]))
    (0, 2)
    """
    found = {id(tensor) for tensor in tensors if tensor.device.type == "cpu" and tensor.is_shared()}
    spans = sorted(
        (*_span(tensor), id(tensor)) for tensor in {id(t): t for t in tensors if t.numel()}.values()
    )
    end, last = 0, 0
    for start, stop, one in spans:
        if start < end:
            found |= {last, one}
        if stop > end:
            end, last = stop, one
    return found


def held_elsewhere(tensors: Sequence[Tensor]) -> set[int]:
    """The ``id`` of tensors whose memory somebody beside ``tensors`` holds, or has lent: a view, a numpy array, a mapped file.

    >>> import torch
    >>> first, second = torch.zeros(3), torch.zeros(3)
    >>> view = second.numpy()
    >>> held_elsewhere([first, second]) == {id(second)}
    True
    """
    by_storage: dict[int, tuple[torch.UntypedStorage, set[int]]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        by_storage.setdefault(storage._cdata, (storage, set()))[1].add(id(tensor))
    found: set[int] = set()
    for address, (storage, own) in by_storage.items():
        # One holder more is ``storage`` itself. Memory that torch did not allocate has owners that it does not count.
        if torch._C._storage_Use_Count(address) > len(own) + 1 or not storage.resizable():
            found |= own
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def padded(size: int, align: int = ALIGN) -> int:
    """``size`` rounded up to a multiple of ``align``."""
    return -(-size // align) * align
