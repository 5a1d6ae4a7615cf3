"""Blocks: the flat pieces of memory that one kernel of a fused optimizer works on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

ALONE = 2**16
"""A parameter of this many elements or more is a block by itself, in its own memory."""

ARENA = 2**19
"""Smaller ones are joined in arenas of at most this many elements: one gathered gradient stays in the cache."""

ALIGN = 16
"""Parameters begin at a multiple of this many elements, so that vector loads are aligned in every dtype."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Block:
    """Parameters in one piece of memory: every tensor is flat, and all are of one length.

    Attributes:
        weight: what the rule moves: float32, or low where nothing keeps float32.  # [n]
        low: the model's weight, which follows it; None where they are one.         # f16[n] or bf16[n]
        slots: the rule's state.          # f32[n] each, or as ``grains`` says; the last ``scalars`` f32[members] each
        members: indices of the parameters in the order of their groups.
        spans: where each of them lies.
        shapes: the shape and the stride of each.
        scalars: how many of the slots hold one number per parameter.
        grains: elements of the weight for each of a slot's, where that is not 1.
        length: of the vectors.
        is_alone: whether this is all of one parameter, whose gradient can be read where it lies.
        has_gaps: whether elements lie between the parameters that are no parameter's.
        is_row: whether its parameters are vectors that lie one after the other without gaps.
    """

    weight: Tensor
    low: Tensor | None
    slots: tuple[Tensor, ...]
    members: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    scalars: int = 0
    grains: tuple[int, ...] = ()
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

    def part(self, first: int, last: int) -> Block:
        """The block of the members ``first`` to ``last - 1`` alone, over the same memory."""
        if (first, last) == (0, len(self.members)):
            return self
        start, stop = self.spans[first][0], self.spans[last - 1][1]
        weight, low, slots = self.chunk(slice(start, stop))
        full = len(slots) - self.scalars
        return Block(
            weight=weight,
            low=low,
            slots=(*slots[:full], *(slot[first:last] for slot in self.slots[full:])),
            members=self.members[first:last],
            spans=tuple((a - start, b - start) for a, b in self.spans[first:last]),
            shapes=self.shapes[first:last],
            scalars=self.scalars,
            grains=self.grains,
        )

    def chunk(self, at: slice) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Weight, low weight and slots of some neighbours, which begin at a multiple of every grain."""
        low = None if self.low is None else self.low[at]
        grains = self.grains or (1,) * len(self.slots)
        slots = zip(self.slots, grains, strict=True)
        return self.weight[at], low, [slot[at.start // g : -(-at.stop // g)] for slot, g in slots]

    def views(self, vector: Tensor, grain: int = 1) -> list[Tensor]:
        """``vector``, of this block's length or more, seen as tensors of the members' shapes and strides.

        With a grain it has one element for that many, and is seen as vectors.
        """
        if grain > 1:
            return [vector[start // grain : -(-stop // grain)] for start, stop in self.spans]
        offset = vector.storage_offset()
        return [
            vector.as_strided(shape, stride, offset + start)
            for (start, _), (shape, stride) in zip(self.spans, self.shapes, strict=True)
        ]


def flat(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as a vector, in the order in which it lies."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def cut(sizes: Sequence[int], align: int = ALIGN) -> Iterator[list[int]]:
    """Indices of ``sizes`` in runs that share an arena, the large ones alone.

    >>> list(cut([ALONE - 1, ALONE, *[ALONE - 1] * 8, 4]))
    [[1], [0, 2, 3, 4, 5, 6, 7, 8], [9, 10]]
    """
    run: list[int] = []
    room = ARENA
    for index, size in enumerate(sizes):
        if size >= ALONE:
            yield [index]
            continue
        if run and padded(size, align) > room:
            yield run
            run, room = [], ARENA
        run.append(index)
        room -= padded(size, align)
    if run:
        yield run


def tied(tensors: Sequence[Tensor]) -> set[int]:
    """The ``id`` of tensors whose memory is somebody else's, too: another tensor's, or another process's.

    >>> import torch
    >>> first, second, third = torch.zeros(6).split(2)
    >>> len(tied([first, second, third])), len(tied([first, second, second.view(1, 2)]))
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


def _span(tensor: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def padded(size: int, align: int = ALIGN) -> int:
    """``size`` rounded up to a multiple of ``align``."""
    return -(-size // align) * align
