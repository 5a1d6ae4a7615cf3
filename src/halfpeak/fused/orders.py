"""Orders: what a road is told to do with some pieces, which is the same in every step but for its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfpeak.fused.counters import Counter
from halfpeak.fused.layout import Piece
from halfpeak.fused.roads.base import Order
from halfpeak.fused.rules.base import Rule


class Orders:
    """The orders for some pieces.

    Args:
        pieces: what is moved.
        groups: hyper-parameters, read anew in every step.
    """

    def __init__(self, pieces: Sequence[Piece], groups: Sequence[dict[str, Any]]) -> None:
        self._pieces = pieces
        self._groups = list(groups)
        sources: dict[tuple[Rule, int, int, torch.dtype], _Source] = {}
        self._orders: list[Order] = []
        for piece in pieces:
            rule, group, weight = piece.rule, self._groups[piece.group], piece.block.weight
            wide = torch.promote_types(weight.dtype, torch.float32)
            key = (rule, piece.group, id(piece.counter), wide)
            if key not in sources:
                length = 1 + len(rule.constants(group, 1.0))
                room = torch.empty(length, dtype=wide, device=weight.device)
                sources[key] = _Source(rule, group, piece.counter, room)
            self._orders.append(Order(piece, rule, group, sources[key].numbers))
        self._sources = list(sources.values())

    def are_for(self, pieces: Sequence[Piece], groups: Sequence[dict[str, Any]]) -> bool:
        """Whether they are of these very pieces and groups."""
        return (
            self._pieces is pieces
            and len(groups) == len(self._groups)
            and all(map(is_, groups, self._groups))
        )

    def of_step(self, factor: Tensor) -> list[Order]:
        """The orders of the coming step; those of the last hold no more.

        Args:
            factor: what gradients are multiplied by.  # f32[]
        """
        number = float(factor)
        # What may raise comes first: a bad learning rate must not have changed the numbers of some orders.
        values = [source.values(number) for source in self._sources]
        for source, one in zip(self._sources, values, strict=True):
            source.numbers.copy_(torch.tensor(one, dtype=source.numbers.dtype, device="cpu"))
        return self._orders


class _Source(NamedTuple):
    """Where numbers come from, and the tensor that they go to."""

    rule: Rule
    group: dict[str, Any]
    counter: Counter
    numbers: Tensor

    def values(self, factor: float) -> list[float]:
        sign = -1.0 if self.group.get("maximize") else 1.0
        constants = self.rule.constants(self.group, float(self.counter.step) + 1)
        return [sign * factor, *map(float, constants)]
