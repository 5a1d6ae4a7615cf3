"""FlatLayout: places the weights and states of one optimizer in flat buffers, and notices when they have moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import is_
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.optimizer_state import params_of
from halfpeak.fused.flat.buffers import (
    ALIGN,
    MIN_STANDALONE,
    FlatBuffer,
    buckets_of,
    flat,
    held_elsewhere,
    padded,
    shares_storage,
)
from halfpeak.fused.flat.step_counts import StepCount, step_counts_of
from halfpeak.fused.rules.base import Rule, StateTensor
from halfpeak.fused.state_dtypes.codecs import REMAINDER
from halfpeak.fused.validation import check_parameter, check_state
from halfpeak.ops.foreach import is_dense
from halfpeak.ops.shards import has_shards, is_shard, local_of, shard_like, split_of

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class BufferSlice:
    """A buffer or a part of one. All its parameters are updated in this step, by one rule and with one step count."""

    buffer: FlatBuffer
    step_count: StepCount
    group: int
    rule: Rule


class FlatLayout:
    """The flat buffers of an optimizer's parameters.

    Small parameters are moved into shared buffers: their ``data`` and their state tensors become views. Parameters that
    share memory with each other or with another process keep their memory and are stepped there. A small parameter
    whose memory other code holds is a *guest*: it keeps its memory, and the buffer has a copy.

    If a parameter or a state is replaced (a new group, ``load_state_dict``, ``parameter.data = ...``),
    :meth:`is_current` is False, and the next layout starts from the new tensors. Comparing addresses is enough, because
    no new tensor can get an address that this layout keeps allocated.

    Attributes:
        last: the last :meth:`slices`.
        by_split: these by the mesh and its dimensions over which their parameters are sharded, or None if unsharded.
        written: every tensor that a step over them writes.
        guests: (guest, its view in the buffer) for each guest among these; copied in before a step and out after it.

    Args:
        optimizer: its state gets a row for every parameter laid out, and loses those of parameters never stepped.
        rules: one per group.
        model_params: in the order of the groups, the model's weight of each master, and each other parameter itself.
        has_gradient: which parameters to lay out now, beside those that were stepped before.
        before: the previous layout, which gives up its buffers.
        masters: float32 masters that are stepped in place of their parameters.

    Raises:
        ParameterError: no kernel can step a parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rules: Sequence[Rule],
        model_params: Sequence[Tensor],
        has_gradient: Sequence[bool],
        before: FlatLayout | None = None,
        masters: Mapping[Tensor, Tensor] = MappingProxyType({}),
    ) -> None:
        self.rules = list(rules)
        self.params = params_of(optimizer)
        self.targets = [masters.get(parameter, parameter) for parameter in self.params]
        self.model_params = list(model_params)
        self._memory = memory_of(self.targets)
        # One object where a weight has no master, because each to_local() of a shard makes another.
        self._low_memory = [
            memory if low is target else low_memory
            for memory, low_memory, low, target in zip(
                self._memory, memory_of(self.model_params), self.model_params, self.targets, strict=True
            )
        ]
        self._group_of = [g for g, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        self._rules = [self.rules[g].for_weight(t) for g, t in zip(self._group_of, self.targets, strict=True)]
        known = [i for i, param in enumerate(self.params) if has_gradient[i] or param in optimizer.state]
        for index in known:
            check_parameter(self.targets[index], self._rules[index])
        self._counters = step_counts_of(
            {index: (self.params[index], self._group_of[index]) for index in known},
            optimizer.state,
            optimizer.param_groups,
            self.rules,
            () if before is None else before.counted_rows(),
        )
        # A step that was skipped has made state of parameters that are not stepped now. No file has it, and a resumed run
        # must have the same buffers, because torch's CPU loops round an element by its place in a buffer.
        for index in [i for i in self._unstepped() if not has_gradient[i]]:
            del self._counters[index]
            row = optimizer.state.pop(self.params[index])
            if REMAINDER in row:
                optimizer.state[self.params[index]] = unstepped_row(row)
        wanted = list(self._counters)
        if before is not None:
            before._release()
        self._guests: list[tuple[Tensor, Tensor]] = []
        self._held = held_elsewhere([t for i in wanted for t in (self._memory[i], self._low_memory[i])])
        # FSDP2 holds the memory of shards.
        self._held |= {id(self._memory[i]) for i in wanted if is_shard(self.targets[i])}
        self._buffers: list[tuple[int, FlatBuffer]] = []
        bound = shares_storage([*self._memory, *self._low_memory])
        alone = {i for i in wanted if id(self._memory[i]) in bound or id(self._low_memory[i]) in bound}
        for (group, _), members in _sorted_groups(wanted, self._kind):
            align = _alignment(self._rules[members[0]])
            for run in buckets_of(
                [MIN_STANDALONE if i in alone else self._memory[i].numel() for i in members], align
            ):
                buffer = self._lay_out(optimizer, group, [members[i] for i in run])
                self._buffers.append((group, buffer))
        self._state = optimizer.state
        self._row_of = {index: optimizer.state[self.params[index]] for index in wanted}
        self._rows = list(optimizer.state.values())
        self._row_values = _values_of(self._rows)
        # A state tensor can stay the same object and get other memory: optimizer.state[p]["exp_avg"].data = ...
        self._states = [
            row[part.name] for index, row in self._row_of.items() for part in self._rules[index].storage
        ]
        self._state_places = [] if has_shards(self._states) else _places(self._states)
        self._group_counts = {
            self._group_of[i]: counter
            for i, counter in self._counters.items()
            if self._rules[i].step_scope == "group"
        }
        self._group_steps: dict[int, Tensor | int] = {g: one.step for g, one in self._group_counts.items()}
        self._places = _places(self._memory)
        self._low_places = _places(self._low_memory)
        self._mask: list[bool] = []
        self.written: list[Tensor] = []
        self.guests: list[tuple[Tensor, Tensor]] = []
        self.last: list[BufferSlice] = []
        self.by_split: dict[Any, list[BufferSlice]] = {}
        self._counts: list[StepCount] = []

    def is_current(self, optimizer: Optimizer, rules: Sequence[Rule], model_params: Sequence[Tensor]) -> bool:
        """Whether weights and states are still where this layout put them."""
        return (
            all(map(is_, model_params, self.model_params))
            and list(rules) == self.rules
            and _places(memory_of(self.targets)) == self._places
            and _places(memory_of(model_params)) == self._low_places
            and self._holds_state(optimizer)
        )

    def slices(self, mask: list[bool]) -> list[BufferSlice] | None:
        """The slices to update; None if parameters must be laid out anew for those that have a gradient (``mask``)."""
        if mask == self._mask:
            return self.last
        if any(has and i not in self._counters for i, has in enumerate(mask)) or any(
            not mask[i] for i in self._unstepped(on_cpu=True)
        ):
            return None
        self._split_counts(mask)
        is_final = self._merge_counts(mask)
        self.last = [
            BufferSlice(buffer.part(run[0], run[-1] + 1), counter, group, self._rules[buffer.members[0]])
            for group, buffer in self._buffers
            for counter, run in self._runs(buffer, mask, each=self.rules[group].layerwise)
        ]
        by_split = dict(
            _sorted_groups(self.last, lambda slice_: split_of(self.targets[slice_.buffer.members[0]]))
        )
        # If one has all of them, it is the same list, by which a backend knows them again.
        self.by_split = dict.fromkeys(by_split, self.last) if len(by_split) == 1 else by_split
        moved = [i for slice_ in self.last for i in slice_.buffer.members]
        self.written = [self.targets[i] for i in moved]
        self.written += [self.model_params[i] for i in moved if self.model_params[i] is not self.targets[i]]
        moving = {id(memory[i]) for i in moved for memory in (self._memory, self._low_memory)}
        self.guests = [(guest, place) for guest, place in self._guests if id(guest) in moving]
        self._mask = mask if is_final else []
        self._counts = list({id(counter): counter for counter in self._counters.values()}.values())
        return self.last

    def number_group_steps(self, groups: Sequence[dict[str, Any]], found_inf: Tensor | None) -> None:
        """After a step, give each group that counts its steps an ``int``, or the tensor where the device has decided.

        Waits at most once for a device: when a count that it has decided becomes a number.

        Args:
            groups: the optimizer's.
            found_inf: what kernels have read to decide whether to step; None if they have not.
        """
        stepped = {slice_.group for slice_ in self.last}
        for group, counter in self._group_counts.items():
            before, is_there = groups[group]["step"], counter.step.device.type != "cpu"
            if is_there and found_inf is not None:
                after: Tensor | int = counter.step
            elif is_there and isinstance(before, int):
                after = before + (group in stepped)
            else:
                after = int(counter.step)
            groups[group]["step"] = self._group_steps[group] = after

    def check_counts(self) -> None:
        """Check the shared step counts before a step reads the states.

        Raises:
            StateError: user code has written in place to a step count that several parameters share.
        """
        for counter in self._counts:
            counter.check(self._rows)

    def counted_rows(self) -> Iterator[tuple[Any, StepCount]]:
        """The state row and the step count of each parameter laid out."""
        return ((row, self._counters[index]) for index, row in self._row_of.items())

    def idle_rows(self) -> set[int]:
        """The ``id`` of each row with initial values only, because its first step was skipped."""
        return {id(self._row_of[index]) for index in self._unstepped()}

    def _unstepped(self, *, on_cpu: bool = False) -> list[int]:
        """Parameters that are laid out and were never stepped.

        Args:
            on_cpu: leave out those whose count is elsewhere, where reading it would make the host wait.
        """
        counts = {id(counter): counter.step for counter in self._counters.values()}
        never = {
            key for key, step in counts.items() if not (on_cpu and step.device.type != "cpu") and not step
        }
        return [index for index, counter in self._counters.items() if id(counter) in never]

    def _runs(
        self, buffer: FlatBuffer, mask: Sequence[bool], *, each: bool
    ) -> Iterator[tuple[StepCount, list[int]]]:
        """Runs of neighbours in a buffer with a gradient and one step count; with ``each``, one parameter per run."""
        keyed = [
            (self._counters[member] if mask[member] else None, i) for i, member in enumerate(buffer.members)
        ]
        for _, run in groupby(keyed, key=lambda pair: id(pair[0])):
            pairs = list(run)
            counter = pairs[0][0]
            if counter is not None and each:
                yield from ((counter, [i]) for _, i in pairs)
            elif counter is not None:
                yield counter, [i for _, i in pairs]

    def _split_counts(self, mask: Sequence[bool]) -> None:
        """Give parameters without a gradient a step count apart from the parameters that step."""
        moving = {id(counter) for i, counter in self._counters.items() if mask[i]}
        left: dict[int, StepCount] = {}
        for index, counter in self._counters.items():
            if not mask[index] and id(counter) in moving:
                where = self._rules[index].step_scope
                if where == "group":
                    continue
                own = left.setdefault(id(counter), StepCount(counter.step.clone()))
                self._counters[index] = own
                if where == "parameter":
                    self._state[self.params[index]]["step"] = own.step

    def _merge_counts(self, mask: Sequence[bool]) -> bool:
        """Merge the counts of parameters of one group that have taken the same number of steps, as a load does.

        A resumed run must have the same slices, because torch's CPU loops round an element by its place in a slice. Our
        kernels on an accelerator do not, and reading the counts there would make the host wait.

        Returns:
            False before the first step of a rule that keeps no count, because the slices may change after that step.
        """
        found: dict[tuple[int, float], StepCount] = {}
        is_final = True
        for index, counter in self._counters.items():
            where = self._rules[index].step_scope
            if not mask[index] or where == "group" or counter.step.device.type != "cpu":
                continue
            number = float(counter.step)
            if where == "nowhere":
                is_final, number = is_final and number > 0, min(number, 1.0)
            shared = found.setdefault((self._group_of[index], number), counter)
            if shared is not counter:
                self._counters[index] = shared
                if where == "parameter":
                    self._state[self.params[index]]["step"] = shared.step
        self._row_values = _values_of(self._rows)
        return is_final

    def _kind(self, index: int) -> tuple[int, tuple[Any, ...]]:
        target, low = self.targets[index], self.model_params[index]
        return self._group_of[index], (
            target.device,
            target.dtype,
            None if low is target else low.dtype,
            split_of(target),
            self._rules[index],
        )

    def _lay_out(self, optimizer: Optimizer, group: int, members: Sequence[int]) -> FlatBuffer:
        targets = [self._memory[i] for i in members]
        model_params = [self._low_memory[i] for i in members]
        rule, settings = self._rules[members[0]], optimizer.param_groups[group]
        align = _alignment(rule)
        spans: list[tuple[int, int]] = []
        for target in targets:
            start = padded(spans[-1][1], align) if spans else 0
            spans.append((start, start + target.numel()))
        strides = [_dense_stride(target) for target in targets]
        buffer = FlatBuffer(
            weight=self._join(targets, spans, strides),
            low=None if model_params[0] is targets[0] else self._join(model_params, spans, strides),
            states=(),
            members=tuple(members),
            spans=tuple(spans),
            shapes=tuple(
                (tuple(target.shape), stride) for target, stride in zip(targets, strides, strict=True)
            ),
        )
        rows = [optimizer.state[self.params[i]] for i in members]
        states: list[Tensor] = []
        for index, (part, start) in enumerate(zip(rule.storage, rule.initial(settings), strict=True)):
            in_rows = [row.get(part.name) for row in rows]
            known = [None if value is None else memory_of([value])[0] for value in in_rows]
            is_scalar = index >= len(rule.state_names) - rule.per_param_scalars
            length = len(members) if is_scalar else -(-len(buffer) // part.block_size)
            vector = _vector(targets, known, length, start, part)
            views = list(vector.unbind()) if is_scalar else buffer.views(vector, part.block_size)
            for row, view, value, member in zip(rows, views, known, members, strict=True):
                if value is not None and value.data_ptr() != view.data_ptr():
                    check_state(part.name, value, view)
                    view.copy_(value)
                target = self.targets[member]
                shape = part.shape_for(target.shape) if part.block_size > 1 else None
                row[part.name] = shard_like(view, target, shape)
            states.append(vector)
        if rule.step_scope == "parameter":
            for index, row in zip(members, rows, strict=True):
                row["step"] = self._counters[index].step
        sizes = tuple(part.block_size for part in rule.storage)
        return replace(
            buffer,
            states=tuple(states),
            per_param_scalars=rule.per_param_scalars,
            block_sizes=sizes if max(sizes, default=1) > 1 else (),
        )

    def _join(
        self, tensors: Sequence[Tensor], spans: Sequence[tuple[int, int]], strides: Sequence[tuple[int, ...]]
    ) -> Tensor:
        """View one dense tensor as a vector in its own memory, or move several into one new buffer."""
        if len(tensors) == 1 and tensors[0].stride() == strides[0]:
            return flat(tensors[0])
        buffer = tensors[0].new_zeros(padded(spans[-1][1]))
        for tensor, (start, _), stride in zip(tensors, spans, strides, strict=True):
            view = buffer.as_strided(tensor.shape, stride, start)
            view.copy_(tensor.detach())
            if id(tensor) in self._held:
                self._guests.append((tensor, view))
            else:
                # The parameter stays the same object; only its memory changes.
                tensor.data = view
        return buffer

    def _release(self) -> None:
        """Drop all references to memory, so that :func:`held_elsewhere` counts only references of other code."""
        self._buffers, self.last, self._places = [], [], []
        self.by_split = {}
        self._guests, self.guests = [], []

    def _holds_state(self, optimizer: Optimizer) -> bool:
        row_values = _values_of(optimizer.state.values())
        return (
            optimizer.state is self._state
            and len(row_values) == len(self._row_values)
            and all(map(is_, row_values, self._row_values))
            and (not self._state_places or _places(self._states) == self._state_places)
            and all(
                optimizer.param_groups[group].get("step") is step for group, step in self._group_steps.items()
            )
        )


def unstepped_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a state row keeps that was made for a step which was skipped: the remainder, which belongs to the weight."""
    return {REMAINDER: row[REMAINDER]} if REMAINDER in row else {}


def _values_of(rows: Iterable[dict[str, Any]]) -> list[Any]:
    """All values of all state rows in one list. Runs in every step, so the loop runs in C (``map``)."""
    return list(chain.from_iterable(map(dict[str, Any].values, rows)))


def memory_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The memory that kernels work on: the tensors themselves, or this rank's part of each shard."""
    return local_of(tensors) if has_shards(tensors) else tensors


def _places(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The stride of a dense tensor; for a tensor with gaps, the stride of a contiguous tensor of its shape."""
    return tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()


def _vector(
    targets: Sequence[Tensor], known: Sequence[Tensor | None], length: int, start: float, part: StateTensor
) -> Tensor:
    """Memory for one state tensor of all members: a single member's present tensor if it fits, else a new vector."""
    target, there = targets[0], known[0]
    dtype = part.dtype or torch.promote_types(target.dtype, torch.float32)
    if len(targets) == 1 and there is not None:
        fits = there.stride() == target.stride() if part.block_size == 1 else there.is_contiguous()
        if (
            fits
            and (there.dtype, there.device) == (dtype, target.device)
            and there.shape == part.shape_for(target.shape)
        ):
            return flat(there)
    return torch.full((length,), start, dtype=dtype, device=target.device)


def _alignment(rule: Rule) -> int:
    """The alignment of parameters in elements: no element of a state tensor may belong to two parameters."""
    return max(ALIGN, *(part.block_size for part in rule.storage)) if rule.storage else ALIGN


def _sorted_groups(members: Sequence[T], key: Callable[[T], Any]) -> list[tuple[Any, list[T]]]:
    found: dict[Any, list[T]] = {}
    for member in members:
        found.setdefault(key(member), []).append(member)
    return list(found.items())
