"""The eager road on a device: torch operations that decide by data, so that nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfpeak.fused.blocks import Block
from halfpeak.fused.gather import Gather
from halfpeak.fused.kernel import measure
from halfpeak.fused.layout import Piece
from halfpeak.fused.roads.base import DeviceRoad, Moves, Reading
from halfpeak.fused.rules.base import Rule

CHUNK = 2**22
"""Elements at a time: enough to keep a device busy, and intermediate results take little beside what is held."""


class EagerDeviceRoad(DeviceRoad):
    """Runs on every accelerator, and steps what no kernel is written for: float64, layer-wise rules, several devices."""

    name = "eager"

    def __init__(self) -> None:
        self._gather = Gather()

    def measure(self, pieces: Sequence[Piece], grads: Sequence[Tensor | None], factor: Tensor) -> Reading:
        """See :class:`~halfpeak.fused.roads.base.DeviceRoad`."""
        home = factor.device
        read = [
            measure(chunk, factor.to(chunk.device))
            for piece in pieces
            for chunk in self._gather(piece.block, grads).split(CHUNK)
        ]
        squares, flags = zip(*[(total.to(home), flag.to(home)) for total, flag in read], strict=True)
        return Reading(torch.stack(squares).sum(), torch.stack(flags).any().float())

    def move(self, moves: Moves) -> None:
        """See :class:`~halfpeak.fused.roads.base.DeviceRoad`."""
        if moves.limit is not None:
            norm = self.measure(moves.pieces, moves.grads, moves.factor).squares.sqrt()
            clip = torch.where(norm > moves.limit, moves.limit / norm, 1.0)
            moves = moves._replace(factor=moves.factor * clip)
        numbers: dict[tuple[Rule, int, torch.dtype], Tensor] = {}
        for piece in moves.pieces:
            if piece.rule.layerwise and not len(piece.block):
                continue  # nothing has no norm
            wide = torch.promote_types(piece.block.weight.dtype, torch.float32)
            key = (piece.rule, id(piece.counter), wide)
            if key not in numbers:
                numbers[key] = _numbers(piece, moves, wide)
            grad = self._gather(piece.block, moves.grads)
            size = len(grad) if piece.rule.layerwise else CHUNK
            for start in range(0, len(grad), size):
                _update(piece, grad, slice(start, start + size), numbers[key], moves.found_inf)
        for counter in {id(piece.counter): piece.counter for piece in moves.pieces}.values():
            found_inf = moves.found_inf
            counter.step.add_(1 if found_inf is None else found_inf.to(counter.step.device) == 0)

    def forget(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.DeviceRoad`."""
        self._gather.forget()

    def clear(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.DeviceRoad`."""
        self._gather.clear()


def _numbers(piece: Piece, moves: Moves, wide: torch.dtype) -> Tensor:
    """What a gradient is multiplied by, then the rule's constants.  # wide[1 + k]"""
    device, group = piece.block.weight.device, moves.groups[piece.group]
    # A float32 would lose most of 1 - 0.999**t; Metal has nothing wider.
    exact = torch.float32 if device.type == "mps" else torch.float64
    constants = piece.rule.constants(group, piece.counter.step.to(device, exact) + 1)
    sign = -1.0 if group.get("maximize") else 1.0
    values = [_there(value, device, exact) for value in (moves.factor, *constants)]
    values[0] = values[0] * sign
    return torch.stack(values).to(wide)


def _there(value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.reshape(()).to(device, dtype)
    # Filled in by a kernel: a copy from ordinary host memory would wait.
    return torch.full((), float(value), dtype=dtype, device=device)


def _update(piece: Piece, grad: Tensor, at: slice, numbers: Tensor, found_inf: Tensor | None) -> None:
    weight, low, slots = piece.block.chunk(at) if not piece.rule.layerwise else _all_of(piece.block)
    wide = numbers.dtype
    factor, *constants = numbers.unbind()
    whole, *state = piece.rule.read(weight, slots, wide)
    moved = piece.rule(whole, grad[at].to(wide) * factor, state, constants)
    skips = None if found_inf is None else found_inf.to(grad.device) != 0
    written = zip((weight, *slots), piece.rule.written(moved, constants), strict=True)
    # What is written together was read together: an encoding may depend on all of it.
    ends = [
        (end, value if skips is None else torch.where(skips, end, value.to(end.dtype)))
        for end, value in written
    ]
    for end, value in ends:
        end.copy_(value)
    if low is not None:
        low.copy_(moved[0] if skips is None else torch.where(skips, low, moved[0].to(low.dtype)))


def _all_of(block: Block) -> tuple[Tensor, Tensor | None, Sequence[Tensor]]:
    return block.weight, block.low, block.slots
