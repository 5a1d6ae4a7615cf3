"""Flat buffers: one-dimensional memory of one or several parameters, on which the kernels of a fused optimizer work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MIN_STANDALONE = 2**16
"""A parameter of at least this many elements is a buffer by itself and keeps its own memory."""

MAX_BUCKET = 2**19
"""Smaller parameters share buckets of at most this many elements, so that a packed gradient stays in the cache."""

ALIGN = 16
"""Parameters begin at a multiple of this many elements, so that vector loads are aligned in every dtype."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class FlatBuffer:
    """Parameters in one piece of memory, as one-dimensional tensors.

    Attributes:
        weight: the vector that the rule updates: float32 or float64, or low-precision weights without masters.  # [n]
        low: the model's low-precision weights, written with their masters; None without masters.  # f16[n] or bf16[n]
        states: the rule's state vectors, [n] or as ``block_sizes`` says; the last ``per_param_scalars`` are [members].
        members: indices of the parameters in the order of the groups.
        spans: start and end of each member.
        shapes: shape and stride of each member.
        per_param_scalars: how many of the states hold one number per parameter.
        block_sizes: for each state, elements of the weight per element of the state; empty if all are 1.
        length: of ``weight``.
        is_alone: whether the buffer is exactly one whole parameter, whose gradient can be read in place.
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
        """The buffer of the members ``first`` to ``last - 1`` alone, over the same memory."""
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
        """Weight, low weight and states of a range of elements, which begins at a multiple of every block_size."""
        low = None if self.low is None else self.low[at]
        block_sizes = self.block_sizes or (1,) * len(self.states)
        slots = zip(self.states, block_sizes, strict=True)
        return self.weight[at], low, [slot[at.start // g : -(-at.stop // g)] for slot, g in slots]

    def views(self, vector: Tensor, block_size: int = 1) -> list[Tensor]:
        """View ``vector``, of this buffer's length or more, as one tensor per member with its shape and stride.

        With a block_size above 1, ``vector`` has one element per block, and the views are [rows, blocks of a row].
        """
        if block_size > 1:
            return [
                vector[start // block_size : stop // block_size].view(
                    shape[0], math.prod(shape[1:]) // block_size
                )
                for (start, stop), (shape, _) in zip(self.spans, self.shapes, strict=True)
            ]
        offset = vector.storage_offset()
        return [
            vector.as_strided(shape, stride, offset + start)
            for (start, _), (shape, stride) in zip(self.spans, self.shapes, strict=True)
        ]


def flat(tensor: Tensor) -> Tensor:
    """View a dense tensor as a vector in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def buckets_of(sizes: Sequence[int], align: int = ALIGN) -> Iterator[list[int]]:
    """Indices of ``sizes`` grouped into buckets. A size of at least :data:`MIN_STANDALONE` is alone.

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
    """The ``id`` of tensors that share memory with another of ``tensors`` or with another process.

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
    """The ``id`` of tensors whose memory is also held or owned outside ``tensors``: by a view, numpy, a mapped file.

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
        # ``storage`` itself is one reference more. Torch does not count the owners of memory that it did not allocate.
        if torch._C._storage_Use_Count(address) > len(own) + 1 or not storage.resizable():
            found |= own
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def padded(size: int, align: int = ALIGN) -> int:
    """``size`` rounded up to a multiple of ``align``."""
    return -(-size // align) * align
