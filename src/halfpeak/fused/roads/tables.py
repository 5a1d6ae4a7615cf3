"""Tables: where everything lies that the Triton kernels read and write, as numbers on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from halfpeak.fused.forms.loading import REMAINDER
from halfpeak.fused.layout import Piece
from halfpeak.fused.roads.settings import Settings, hyper, lr_there, settings_of
from halfpeak.fused.rules.base import Rule


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Table:
    """Host numbers on a device, sent only when they have changed, from pinned memory and without waiting.

    Args:
        device: where to.
        dtype: of the numbers.
        width: how many make a row.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, width: int) -> None:
        self._device, self._dtype, self._width = device, dtype, width
        self._values: list[Any] | None = None
        self._tensor: Tensor | None = None
        self._is_late = False

    def put(self, values: list[Any]) -> Tensor:
        """The tensor that holds ``values``; while a graph is being captured they come with :meth:`flush`."""
        if values != self._values or self._tensor is None:
            self._values = values
            self._is_late = is_capturing(self._device)
            if self._is_late:
                shape = (len(values) // self._width, self._width)
                self._tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
            else:
                self._tensor = self._on_host().to(self._device, non_blocking=True)
        return self._tensor

    def rewrite(self, values: list[Any]) -> None:
        """Write ``values`` where the last ones lie, because a graph reads them there."""
        if values != self._values:
            self._values, self._is_late = values, True
            self.flush()

    def flush(self) -> None:
        """Send what could not be sent while a graph was being captured."""
        if self._is_late and self._tensor is not None:
            self._is_late = False
            self._tensor.copy_(self._on_host(), non_blocking=True)

    def _on_host(self) -> Tensor:
        pinned = self._device.type == "cuda"
        values = torch.tensor(self._values, dtype=self._dtype, device="cpu", pin_memory=pinned)
        return values.view(-1, self._width)


class Kind(NamedTuple):
    """What one launch of a kernel serves.

    Attributes:
        weight: what the rule moves.
        low: the model's weight; None where they are one.
        grad: the gradients.
        rule: how.
    """

    weight: torch.dtype
    low: torch.dtype | None
    grad: torch.dtype
    rule: Rule

    @property
    def settings(self) -> Settings:
        """The rule, as the kernels are told of it."""
        settings = settings_of(self.rule)
        assert settings is not None
        return settings


class _Member(NamedTuple):
    """A parameter: its number, its form, and its row of the table but for its chunks."""

    number: int
    stride: tuple[int, ...]
    shape: tuple[int, ...]
    row: list[int]
    is_aligned: bool


class _Fleet(NamedTuple):
    """The members of one kind: which of all they are, and their chunks, those that a parameter fills first."""

    kind: Kind
    first: int
    last: int
    chunks: Tensor
    full: int
    is_aligned: bool


class Tables:
    """The tables of some pieces.

    Args:
        kernels: that read them.
        pieces: all on one device.
        grads: of all parameters. Only their dtypes count.

    Attributes:
        pieces: see there.
    """

    def __init__(self, kernels: Any, pieces: Sequence[Piece], grads: Sequence[Tensor | None]) -> None:
        self.pieces = pieces
        self._kernels = kernels
        self._device = device = pieces[0].block.weight.device
        self._counters = list({id(piece.counter): piece for piece in pieces}.values())
        rows = {id(piece.counter): row for row, piece in enumerate(self._counters)}
        kinds: dict[Kind, list[_Member]] = {}
        for piece in pieces:
            for member in _members(piece, rows[id(piece.counter)]):
                low = None if piece.block.low is None else piece.block.low.dtype
                grad = cast(Tensor, grads[member.number]).dtype
                kinds.setdefault(Kind(piece.block.weight.dtype, low, grad, piece.rule), []).append(member)
        members = [member for known in kinds.values() for member in known]
        self._order = [member.number for member in members]
        self._dtypes = [kind.grad for kind, known in kinds.items() for _ in known]
        self._forms = [(member.stride, member.shape) for member in members]
        self._strides = [member.stride for member in members]
        self._fleets = self._gathered(kinds)
        own = Table(device, torch.int64, kernels.COLUMNS)
        self._members = own.put([number for member in members for number in member.row])
        self._grads = Table(device, torch.int64, 1)
        self._rows = Table(device, torch.int64, 3)
        self._hyper = Table(device, torch.float64, kernels.HYPER)
        self._processors: int = kernels.processors_of(device)
        self._lrs: list[Tensor | None] = []
        self._last: Sequence[Tensor | None] | None = None
        self._held: list[Tensor] = []
        self._addresses: list[int] = []
        self._chunks: list[tuple[Kind, Any]] = []

    def fits(self, pieces: Sequence[Piece], grads: Sequence[Tensor | None]) -> bool:
        """Whether these are the tables of ``pieces`` with gradients of these dtypes."""
        return pieces is self.pieces and (
            grads is self._last or list(map(_DTYPE, [grads[i] for i in self._order])) == self._dtypes
        )

    def chunks(self, grads: Sequence[Tensor | None]) -> list[tuple[Kind, Any]]:
        """The chunks of each kind, with the addresses of these gradients."""
        if grads is self._last:
            return self._chunks
        own = cast(list[Tensor], [grads[i] for i in self._order])
        if list(map(Tensor.stride, own)) != self._strides or any(map(Tensor.is_neg, own)):
            own = list(starmap(_in_order, zip(own, self._forms, strict=True)))
        self._last, self._held = grads, own
        addresses = list(map(Tensor.data_ptr, own))
        if addresses != self._addresses or is_capturing(self._device):
            self._addresses = addresses
            self._chunks = self._chunks_at(addresses)
        return self._chunks

    def _chunks_at(self, addresses: list[int]) -> list[tuple[Kind, Any]]:
        table = self._grads.put(addresses)
        return [
            (
                fleet.kind,
                self._kernels.Chunks(
                    fleet.first,
                    fleet.last - fleet.first,
                    self._members,
                    table,
                    fleet.chunks,
                    fleet.full,
                    self._processors,
                    fleet.is_aligned and not any(map(_FIFTEEN, addresses[fleet.first : fleet.last])),
                    fleet.kind.grad,
                ),
            )
            for fleet in self._fleets
            if len(fleet.chunks)
        ]

    def rows(self, groups: Sequence[dict[str, Any]]) -> Tensor:
        """Group, address of the step count and of the learning rate, for each row of numbers.  # i64[rows, 3]"""
        self._lrs = [lr_there(group) for group in groups]
        places = [0 if lr is None else lr.data_ptr() for lr in self._lrs]
        return self._rows.put(
            [
                number
                for piece in self._counters
                for number in (piece.group, piece.counter.step.data_ptr(), places[piece.group])
            ]
        )

    def hyper(self, groups: Sequence[dict[str, Any]]) -> Tensor:
        """The hyper-parameters of each group.  # f64[groups, HYPER]"""
        return self._hyper.put(self._hypers(groups))

    def forget(self) -> None:
        """The gradients change from here on."""
        self._last = None
        self._held = []

    def flush(self) -> None:
        """Send what could not be sent while a graph was being captured."""
        for table in (self._grads, self._rows, self._hyper):
            table.flush()

    def rewrite(self, groups: Sequence[dict[str, Any]]) -> None:
        """Hyper-parameters as they are now, where a graph reads them."""
        self._hyper.rewrite(self._hypers(groups))

    def _hypers(self, groups: Sequence[dict[str, Any]]) -> list[float]:
        rules = {piece.group: piece.rule for piece in self._counters}
        width = self._kernels.HYPER
        return [
            number
            for index, group in enumerate(groups)
            for number in (hyper(rules[index], group) if index in rules else [0.0] * width)
        ]

    def _gathered(self, kinds: dict[Kind, list[_Member]]) -> list[_Fleet]:
        fleets: list[_Fleet] = []
        first, size = 0, self._kernels.CHUNK
        for kind, members in kinds.items():
            numels = torch.tensor([member.row[0] for member in members], device="cpu")
            index = torch.arange(first, first + len(members), device="cpu")
            whole, rest = numels // size, numels % size != 0
            full = int(whole.sum())
            start = whole.cumsum(0) - whole
            within = torch.arange(full, device="cpu") - start.repeat_interleave(whole)
            chunks = torch.stack([index.repeat_interleave(whole), within], 1)
            chunks = torch.cat([chunks, torch.stack([index[rest], whole[rest]], 1)]).to(torch.int32)
            last = torch.where(rest, full + rest.cumsum(0) - 1, -1)
            for member, places in zip(members, torch.stack([start, whole, last], 1).tolist(), strict=True):
                member.row.extend(places)
            if self._device.type == "cuda":
                chunks = chunks.pin_memory().to(self._device, non_blocking=True)
            is_aligned = all(member.is_aligned for member in members)
            fleets.append(_Fleet(kind, first, first + len(members), chunks, full, is_aligned))
            first += len(members)
        return fleets


def _members(piece: Piece, number: int) -> list[_Member]:
    """The rows of a piece's parameters: numel, row of numbers, weight, low weight, remainder, slots beside their scales."""
    block = piece.block
    vectors: list[tuple[Tensor | None, int]] = [(None, 1)] * 9
    vectors[:2] = (block.weight, 1), (block.low, 1)
    at = 1
    full = len(block.slots) - block.scalars
    for slot, part in zip(block.slots[:full], piece.rule.parts, strict=False):
        at += 2 if part.grain == 1 and part.name != REMAINDER else 0
        vectors[2 if part.name == REMAINDER else at + (part.grain > 1)] = (slot, part.grain)
    found: list[_Member] = []
    for i, (index, (start, stop)) in enumerate(zip(block.members, block.spans, strict=True)):
        row = [stop - start, number]
        row += [0 if v is None else v.data_ptr() + start // grain * v.itemsize for v, grain in vectors]
        is_aligned = not any(
            place & 15 for place, (_, grain) in zip(row[2:], vectors, strict=True) if grain == 1
        )
        for place, slot in enumerate(block.slots[full:], full):
            row[5 + 2 * place] = slot.data_ptr() + i * slot.itemsize
        shape, stride = block.shapes[i]
        found.append(_Member(index, stride, shape, row, is_aligned))
    return found


def _in_order(grad: Tensor, form: tuple[tuple[int, ...], tuple[int, ...]]) -> Tensor:
    """A gradient in the order of its parameter's memory."""
    stride, shape = form
    # Kernels read memory, where a lazily negated tensor lies with the other sign.
    if grad.stride() == stride and not grad.is_neg():
        return grad
    return torch.empty_strided(shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)


_DTYPE: Final = attrgetter("dtype")
_FIFTEEN: Final = (15).__and__
