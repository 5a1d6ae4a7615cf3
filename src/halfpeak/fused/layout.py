"""Layout: where the weights and states of one optimizer lie, and whether they still lie there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter, is_, itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.fused.blocks import ALIGN, ALONE, Block, cut, flat, padded, tied
from halfpeak.fused.checks import check_parameter, check_state
from halfpeak.fused.counters import Counter, count
from halfpeak.fused.rules.base import Part, Rule
from halfpeak.ops.layouts import is_dense


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """A block, or a part of one, whose parameters are all stepped now, by one rule and from one step count."""

    block: Block
    counter: Counter
    group: int
    rule: Rule


class _Column(NamedTuple):
    """What the states of parameters hold under one name."""

    name: str
    rows: list[Any]
    tensors: list[Tensor]


class Layout:
    """The blocks of an optimizer's parameters.

    Small parameters are moved into arenas: their ``data`` and the tensors of their state become views. Those whose memory is
    not theirs alone stay where they are. Whoever puts another tensor there - ``load_state_dict``, ``parameter.data = ...``,
    a new group - is noticed by :meth:`is_current`, and the next layout starts from what was put there.

    Attributes:
        moving: every tensor that a step of the last :meth:`pieces` writes.
        followed: those of them whose low copies are right afterwards: nothing else writes to the same memory.

    Args:
        optimizer: its state gets a row for every parameter laid out.
        rules: one per group.
        lows: the model's weight for each parameter that is a master of one, else the parameter itself; in the order of
            the groups.
        has_gradient: which of them are to be laid out now, beside those that have a state.
        before: the layout that this one follows.

    Raises:
        ParameterError: a parameter that no kernel here can step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rules: Sequence[Rule],
        lows: Sequence[Tensor],
        has_gradient: Sequence[bool],
        before: Layout | None = None,
    ) -> None:
        self.rules = list(rules)
        self.targets = targets_of(optimizer)
        self.lows = list(lows)
        self._group_of = [g for g, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        wanted = [i for i, target in enumerate(self.targets) if has_gradient[i] or target in optimizer.state]
        for index in wanted:
            check_parameter(self.targets[index])
        self._counters = count(
            {index: (self.targets[index], self._group_of[index]) for index in wanted},
            optimizer.state,
            optimizer.param_groups,
            self.rules,
            () if before is None else before.counted_rows(),
        )
        self._blocks: list[tuple[int, Block]] = []
        self._bound = bound = tied([*self.targets, *self.lows])
        alone = {i for i in wanted if id(self.targets[i]) in bound or id(self.lows[i]) in bound}
        for (group, _), members in _sorted_groups(wanted, self._kind):
            align = _alignment(self._rule(members[0]))
            for run in cut([ALONE if i in alone else self.targets[i].numel() for i in members], align):
                block = self._lay_out(optimizer, group, [members[i] for i in run])
                self._blocks.append((group, block))
        self._state = optimizer.state
        self._row_of = {index: optimizer.state[self.targets[index]] for index in wanted}
        self._rows = list(optimizer.state.values())
        self._in_rows = self._state_tensors(optimizer.state)
        self._group_steps = {
            self._group_of[i]: counter.step
            for i, counter in self._counters.items()
            if self._rule(i).count == "group"
        }
        self._places = _places(self.targets)
        self._low_places = _places(self.lows)
        self._mask: list[bool] = []
        self.moving: list[Tensor] = []
        self.followed: list[Tensor] = []
        self._pieces: list[Piece] = []

    def is_current(self, optimizer: Optimizer, rules: Sequence[Rule], lows: Sequence[Tensor]) -> bool:
        """Whether everything is still where this layout put it."""
        targets = targets_of(optimizer)
        return (
            len(targets) == len(self.targets)
            and all(map(is_, targets, self.targets))
            and all(map(is_, lows, self.lows))
            and list(rules) == self.rules
            and _places(targets) == self._places
            and _places(lows) == self._low_places
            and self._holds_state(optimizer)
        )

    def pieces(self, mask: list[bool]) -> list[Piece] | None:
        """What is to be stepped where ``mask`` says which parameters have a gradient; None if one is not laid out."""
        if mask == self._mask:
            return self._pieces
        if any(has and i not in self._counters for i, has in enumerate(mask)):
            return None
        self._part_company(mask)
        self._pieces = [
            Piece(block.part(run[0], run[-1] + 1), counter, group, self._rule(block.members[0]))
            for group, block in self._blocks
            for counter, run in self._runs(block, mask, each=self.rules[group].layerwise)
        ]
        moved = [i for piece in self._pieces for i in piece.block.members]
        self.moving = [self.targets[i] for i in moved]
        self.moving += [self.lows[i] for i in moved if self.lows[i] is not self.targets[i]]
        self.followed = [target for target in self.moving if id(target) not in self._bound]
        self._mask = list(mask)
        return self._pieces

    @property
    def last(self) -> list[Piece]:
        """What :meth:`pieces` returned last."""
        return self._pieces

    def counters(self, pieces: Sequence[Piece]) -> list[Counter]:
        """The counters of some pieces, each once."""
        return list({id(piece.counter): piece.counter for piece in pieces}.values())

    def counted_rows(self) -> Iterator[tuple[Any, Counter]]:
        """The states of parameters laid out, with the counter of each."""
        return ((row, self._counters[index]) for index, row in self._row_of.items())

    def idle_rows(self) -> set[int]:
        """The ``id`` of each state that says nothing, because its first step was skipped and its rule keeps no count."""
        return {
            id(row)
            for index, row in self._row_of.items()
            if self._rule(index).count == "nowhere" and not self._counters[index].step
        }

    def _runs(self, block: Block, mask: Sequence[bool], *, each: bool) -> Iterator[tuple[Counter, list[int]]]:
        """Neighbours in a block that have a gradient and one counter; ``each`` for one at a time."""
        keyed = [
            (self._counters[member] if mask[member] else None, i) for i, member in enumerate(block.members)
        ]
        for _, run in groupby(keyed, key=lambda pair: id(pair[0])):
            pairs = list(run)
            counter = pairs[0][0]
            if counter is not None and each:
                yield from ((counter, [i]) for _, i in pairs)
            elif counter is not None:
                yield counter, [i for _, i in pairs]

    def _part_company(self, mask: Sequence[bool]) -> None:
        """Parameters that stay behind get a counter of their own."""
        moving = {id(counter) for i, counter in self._counters.items() if mask[i]}
        left: dict[int, Counter] = {}
        for index, counter in self._counters.items():
            if not mask[index] and id(counter) in moving:
                where = self._rule(index).count
                if where == "group":
                    continue
                own = left.setdefault(id(counter), Counter(counter.step.clone()))
                self._counters[index] = own
                if where == "parameter":
                    self._state[self.targets[index]]["step"] = own.step
        if left:
            self._in_rows = self._state_tensors(self._state)

    def _kind(self, index: int) -> tuple[int, tuple[Any, ...]]:
        target, low = self.targets[index], self.lows[index]
        return self._group_of[index], (target.device, target.dtype, None if low is target else low.dtype)

    def _rule(self, index: int) -> Rule:
        return self.rules[self._group_of[index]].for_weight(self.targets[index].dtype)

    def _lay_out(self, optimizer: Optimizer, group: int, members: Sequence[int]) -> Block:
        targets = [self.targets[i] for i in members]
        lows = [self.lows[i] for i in members]
        rule, settings = self._rule(members[0]), optimizer.param_groups[group]
        align = _alignment(rule)
        spans: list[tuple[int, int]] = []
        for target in targets:
            start = padded(spans[-1][1], align) if spans else 0
            spans.append((start, start + target.numel()))
        strides = [_dense_stride(target) for target in targets]
        block = Block(
            weight=_join(targets, spans, strides),
            low=None if lows[0] is targets[0] else _join(lows, spans, strides),
            slots=(),
            members=tuple(members),
            spans=tuple(spans),
            shapes=tuple(
                (tuple(target.shape), stride) for target, stride in zip(targets, strides, strict=True)
            ),
        )
        rows = [optimizer.state[target] for target in targets]
        slots: list[Tensor] = []
        for index, (part, start) in enumerate(zip(rule.parts, rule.initial(settings), strict=True)):
            known = [row.get(part.name) for row in rows]
            is_scalar = index >= len(rule.slots) - rule.scalars
            length = len(members) if is_scalar else -(-len(block) // part.grain)
            vector = _vector(targets, known, length, start, part)
            views = list(vector.unbind()) if is_scalar else block.views(vector, part.grain)
            for row, view, value in zip(rows, views, known, strict=True):
                if value is not None and value.data_ptr() != view.data_ptr():
                    check_state(part.name, value, view)
                    view.copy_(value)
                row[part.name] = view
            slots.append(vector)
        if rule.count == "parameter":
            for index, row in zip(members, rows, strict=True):
                row["step"] = self._counters[index].step
        grains = () if align == ALIGN else tuple(part.grain for part in rule.parts)
        return replace(block, slots=tuple(slots), scalars=rule.scalars, grains=grains)

    def _state_tensors(self, state: Mapping[Any, Any]) -> list[_Column]:
        """For each name in the states of parameters laid out, the rows that have it and what they hold."""
        found: dict[str, _Column] = {}
        for index in self._counters:
            row = state[self.targets[index]]
            rule = self._rule(index)
            for name in (*rule.slots, "step") if rule.count == "parameter" else rule.slots:
                column = found.setdefault(name, _Column(name, [], []))
                column.rows.append(row)
                column.tensors.append(row[name])
        return list(found.values())

    def _holds_state(self, optimizer: Optimizer) -> bool:
        if optimizer.state is not self._state or len(optimizer.state) != len(self._rows):
            return False
        try:
            return (
                all(map(is_, optimizer.state.values(), self._rows))
                and all(
                    all(map(is_, map(itemgetter(column.name), column.rows), column.tensors))
                    for column in self._in_rows
                )
                and all(
                    optimizer.param_groups[group].get("step") is step
                    for group, step in self._group_steps.items()
                )
            )
        except KeyError:
            return False


def targets_of(optimizer: Optimizer) -> list[Tensor]:
    """Whatever stands in an optimizer's groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_GRAD: Final = attrgetter("grad")


def gradients_of(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of each, or None."""
    return list(map(_GRAD, tensors))


def _places(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The stride of a tensor, or where it has gaps that of a contiguous one of its shape."""
    return tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()


def _join(
    tensors: Sequence[Tensor], spans: Sequence[tuple[int, int]], strides: Sequence[tuple[int, ...]]
) -> Tensor:
    """One tensor as a vector where it lies, or several moved into an arena."""
    if len(tensors) == 1 and tensors[0].stride() == strides[0]:
        return flat(tensors[0])
    arena = tensors[0].new_zeros(padded(spans[-1][1]))
    for tensor, (start, _), stride in zip(tensors, spans, strides, strict=True):
        view = arena.as_strided(tensor.shape, stride, start)
        view.copy_(tensor.detach())
        # The parameter stays the same object; only its memory moves.
        tensor.data = view
    return arena


def _vector(
    targets: Sequence[Tensor], known: Sequence[Tensor | None], length: int, start: float, part: Part
) -> Tensor:
    """Memory for one kind of state: the tensor that is there, where it fits, else a new vector."""
    target, there = targets[0], known[0]
    dtype = part.dtype or torch.promote_types(target.dtype, torch.float32)
    if len(targets) == 1 and there is not None:
        shape = (target.shape, target.stride()) if part.grain == 1 else ((length,), (1,))
        if (there.dtype, there.device, there.shape, there.stride()) == (dtype, target.device, *shape):
            return flat(there)
    return torch.full((length,), start, dtype=dtype, device=target.device)


def _alignment(rule: Rule) -> int:
    """Parameters begin at a multiple of this, so that no element of a slot is of two of them."""
    return max(ALIGN, *(part.grain for part in rule.parts)) if rule.parts else ALIGN


def _sorted_groups(members: Sequence[int], key: Any) -> list[tuple[Any, list[int]]]:
    found: dict[Any, list[int]] = {}
    for member in members:
        found.setdefault(key(member), []).append(member)
    return list(found.items())
