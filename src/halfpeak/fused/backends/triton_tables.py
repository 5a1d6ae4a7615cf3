"""Address tables: the addresses of all memory that the Triton kernels read and write, as integers on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from halfpeak.core.torch_compat import is_capturing
from halfpeak.fused.flat.layout import BufferSlice
from halfpeak.fused.flat.pack_gradients import in_order
from halfpeak.fused.rules.base import Rule, gradient_sign
from halfpeak.fused.state_dtypes.codecs import REMAINDER
from halfpeak.ops.triton import KernelConfig, columns

KERNEL_DTYPES: Final = frozenset((torch.float32, torch.float16, torch.bfloat16))
"""Dtypes of weights that the kernels read and write."""


def has_kernel(slice_: BufferSlice) -> bool:
    """Whether the Triton kernels support the rule of a slice and the dtypes of its weights and states."""
    buffer, rule = slice_.buffer, slice_.rule
    weights = {buffer.weight.dtype} if buffer.low is None else {buffer.weight.dtype, buffer.low.dtype}
    storage = zip(buffer.states, rule.storage, strict=True)
    return (
        rule.kernel_config() is not None
        and weights <= KERNEL_DTYPES
        and slice_.step_count.step.dtype == torch.float32
        and all(state.dtype == (stored.dtype or torch.float32) for state, stored in storage)
    )


def hyper_row(rule: Rule, group: Mapping[str, Any], width: int) -> list[float]:
    """The row of a group: sign, lr (0 if lr is on the device), weight decay, then :meth:`Rule.hyper_params`."""
    lr = 0.0 if device_lr(group) is not None else float(group["lr"])
    row = [gradient_sign(group), lr, float(group["weight_decay"]), *rule.hyper_params(group)]
    return row + [0.0] * (width - len(row))


def device_lr(group: Mapping[str, Any]) -> Tensor | None:
    """The learning rate as float32 on the device if the group keeps it there; None if it is on the host.  # f32[]"""
    lr = group["lr"]
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        return None
    return lr if lr.dtype == torch.float32 else lr.float()


class DeviceTable:
    """A table of host numbers on a device, copied asynchronously from pinned memory when a number has changed.

    Args:
        width: numbers per row.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, width: int) -> None:
        self._device, self._dtype, self._width = device, dtype, width
        self._values: list[Any] | None = None
        self._tensor: Tensor | None = None
        self._is_late = False

    def put(self, values: list[Any]) -> Tensor:
        """The tensor that holds ``values``. While a graph is being captured, :meth:`flush` copies them later."""
        if values != self._values or self._tensor is None:
            self._values = values
            self._is_late = is_capturing(self._device)
            if not self._is_late:
                self._tensor = self._on_host().to(self._device, non_blocking=True)
            # Memory of the graph's own pool would be written by earlier launches of every replay.
            elif self._tensor is None or self._tensor.numel() != len(values):
                raise RuntimeError("a table has to be as large before a capture as in it; step once before")
        return self._tensor

    def rewrite(self, values: list[Any]) -> None:
        """Overwrite the last values in place, at the address where a captured graph reads them."""
        if values != self._values:
            self._values, self._is_late = values, True
            self.flush()

    def flush(self) -> None:
        """Copy the values that could not be copied while a graph was being captured."""
        if self._is_late and self._tensor is not None:
            self._is_late = False
            self._tensor.copy_(self._on_host(), non_blocking=True)

    def _on_host(self) -> Tensor:
        pinned = self._device.type == "cuda"
        values = torch.tensor(self._values, dtype=self._dtype, device="cpu", pin_memory=pinned)
        return values.view(-1, self._width)


class LaunchKey(NamedTuple):
    """The properties that parameters of one kernel launch have in common.

    Attributes:
        weight: dtype of the weights that the rule updates.
        low: dtype of the model's weights; None if the rule updates these.
        grad: dtype of the gradients.
        rule: the update rule.
    """

    weight: torch.dtype
    low: torch.dtype | None
    grad: torch.dtype
    rule: Rule

    @property
    def config(self) -> KernelConfig:
        """The rule in the form that the kernels take."""
        config = self.rule.kernel_config()
        assert config is not None
        return config


class TensorRow(NamedTuple):
    """A parameter: index, stride and shape, and its row of the table, which later gets the columns of its chunks."""

    param: int
    stride: tuple[int, ...]
    shape: tuple[int, ...]
    row: list[int]
    is_aligned: bool


class Launch(NamedTuple):
    """The parameters of one key: their range of rows, and their chunks, of which the first ``full`` ones are full."""

    key: LaunchKey
    first: int
    last: int
    chunks: Tensor
    full: int
    is_aligned: bool


class AddressTables:
    """The address tables of some slices.

    Args:
        kernels: the module of kernels that read the tables.
        slices: the slices, all on one device.
        grads: the gradients of all parameters. Only their dtypes matter.
    """

    def __init__(self, kernels: Any, slices: Sequence[BufferSlice], grads: Sequence[Tensor | None]) -> None:
        self.slices = slices
        self._kernels = kernels
        self._device = device = slices[0].buffer.weight.device
        self._counted = list({id(slice_.step_count): slice_ for slice_ in slices}.values())
        number_of = {id(slice_.step_count): number for number, slice_ in enumerate(self._counted)}
        by_key: dict[LaunchKey, list[TensorRow]] = {}
        for slice_ in slices:
            for row in _rows_of(slice_, number_of[id(slice_.step_count)]):
                low = None if slice_.buffer.low is None else slice_.buffer.low.dtype
                grad = cast(Tensor, grads[row.param]).dtype
                by_key.setdefault(LaunchKey(slice_.buffer.weight.dtype, low, grad, slice_.rule), []).append(
                    row
                )
        rows = [row for known in by_key.values() for row in known]
        self._order = [row.param for row in rows]
        self._dtypes = [key.grad for key, known in by_key.items() for _ in known]
        self._shapes = [row.shape for row in rows]
        self._strides = [row.stride for row in rows]
        self._launches = self._make_launches(by_key)
        own = DeviceTable(device, torch.int64, columns.COLUMNS)
        self._members = own.put([number for row in rows for number in row.row])
        self._grads = DeviceTable(device, torch.int64, 1)
        self._rows = DeviceTable(device, torch.int64, 3)
        self._hyper = DeviceTable(device, torch.float64, kernels.HYPER)
        self._processors: int = kernels.processors_of(device)
        self._lrs: list[Tensor | None] = []
        self._last: Sequence[Tensor | None] | None = None
        self._held: list[Tensor] = []
        self._addresses: list[int] = []
        self._chunks: list[tuple[LaunchKey, Any]] = []

    def fits(self, slices: Sequence[BufferSlice], grads: Sequence[Tensor | None]) -> bool:
        """Whether these tables were made for ``slices`` and for gradients of these dtypes."""
        return slices is self.slices and (
            grads is self._last or list(map(_DTYPE, [grads[i] for i in self._order])) == self._dtypes
        )

    def chunks(self, grads: Sequence[Tensor | None]) -> list[tuple[LaunchKey, Any]]:
        """The chunks of each key, with the addresses of ``grads``."""
        if grads is self._last:
            return self._chunks
        own = cast(list[Tensor], [grads[i] for i in self._order])
        if list(map(Tensor.stride, own)) != self._strides or any(map(Tensor.is_neg, own)):
            own = list(starmap(in_order, zip(own, self._shapes, self._strides, strict=True)))
        self._last, self._held = grads, own
        addresses = list(map(Tensor.data_ptr, own))
        if addresses != self._addresses or is_capturing(self._device):
            self._addresses = addresses
            self._chunks = self._chunks_at(addresses)
        return self._chunks

    def _chunks_at(self, addresses: list[int]) -> list[tuple[LaunchKey, Any]]:
        table = self._grads.put(addresses)
        return [
            (
                launch.key,
                self._kernels.Chunks(
                    launch.first,
                    launch.last - launch.first,
                    self._members,
                    table,
                    launch.chunks,
                    launch.full,
                    self._processors,
                    launch.is_aligned and not any(map(_FIFTEEN, addresses[launch.first : launch.last])),
                    launch.key.weight,
                    launch.key.low,
                    launch.key.grad,
                ),
            )
            for launch in self._launches
            if len(launch.chunks)
        ]

    def rows(self, groups: Sequence[dict[str, Any]]) -> Tensor:
        """Group, address of the step count, address of the learning rate or 0, for each step count.  # i64[rows, 3]"""
        self._lrs = [device_lr(group) for group in groups]
        places = [0 if lr is None else lr.data_ptr() for lr in self._lrs]
        return self._rows.put(
            [
                number
                for slice_ in self._counted
                for number in (slice_.group, slice_.step_count.step.data_ptr(), places[slice_.group])
            ]
        )

    def hyper(self, groups: Sequence[dict[str, Any]]) -> Tensor:
        """The hyper-parameters of each group.  # f64[groups, HYPER]"""
        return self._hyper.put(self._hyper_rows(groups))

    def invalidate_grads(self) -> None:
        """Forget the gradients, because they are about to change."""
        self._last = None
        self._held = []

    def flush(self) -> None:
        """Copy the values that could not be copied while a graph was being captured."""
        for table in (self._grads, self._rows, self._hyper):
            table.flush()

    def rewrite(self, groups: Sequence[dict[str, Any]]) -> None:
        """Write the current hyper-parameters to the address where a captured graph reads them."""
        self._hyper.rewrite(self._hyper_rows(groups))

    def _hyper_rows(self, groups: Sequence[dict[str, Any]]) -> list[float]:
        rules = {slice_.group: slice_.rule for slice_ in self._counted}
        width: int = self._kernels.HYPER
        return [
            number
            for index, group in enumerate(groups)
            for number in (hyper_row(rules[index], group, width) if index in rules else [0.0] * width)
        ]

    def _make_launches(self, by_key: dict[LaunchKey, list[TensorRow]]) -> list[Launch]:
        launches: list[Launch] = []
        first, size = 0, self._kernels.CHUNK
        for key, rows in by_key.items():
            numels = torch.tensor([row.row[0] for row in rows], device="cpu")
            index = torch.arange(first, first + len(rows), device="cpu")
            whole, rest = numels // size, numels % size != 0
            full = int(whole.sum())
            start = whole.cumsum(0) - whole
            within = torch.arange(full, device="cpu") - start.repeat_interleave(whole)
            chunks = torch.stack([index.repeat_interleave(whole), within], 1)
            chunks = torch.cat([chunks, torch.stack([index[rest], whole[rest]], 1)]).to(torch.int32)
            last = torch.where(rest, full + rest.cumsum(0) - 1, -1)
            for row, places in zip(rows, torch.stack([start, whole, last], 1).tolist(), strict=True):
                row.row.extend(places)
            if self._device.type == "cuda":
                chunks = chunks.pin_memory().to(self._device, non_blocking=True)
            is_aligned = all(row.is_aligned for row in rows)
            launches.append(Launch(key, first, first + len(rows), chunks, full, is_aligned))
            first += len(rows)
        return launches


def _rows_of(slice_: BufferSlice, number: int) -> list[TensorRow]:
    """The rows of a slice's parameters; see :mod:`halfpeak.ops.triton.columns`."""
    buffer = slice_.buffer
    # By column: a vector, and how many elements of the weight share one of its elements.
    vectors: dict[int, tuple[Tensor, int]] = {columns.WEIGHT: (buffer.weight, 1)}
    if buffer.low is not None:
        vectors[columns.LOW] = (buffer.low, 1)
    column, columns_of_states = columns.WEIGHT, iter(columns.STATES)
    full = len(buffer.states) - buffer.per_param_scalars
    for state, stored in zip(buffer.states[:full], slice_.rule.storage, strict=False):
        if stored.name == REMAINDER:
            column = columns.REST
        elif stored.block_size == 1:
            column = next(columns_of_states)
        else:
            column += 1  # the scales of the state before
        vectors[column] = (state, stored.block_size)
    found: list[TensorRow] = []
    for i, (index, (start, stop)) in enumerate(zip(buffer.members, buffer.spans, strict=True)):
        row = [stop - start, number, *[0] * (columns.CHUNKS - columns.WEIGHT)]
        for column, (vector, size) in vectors.items():
            row[column] = vector.data_ptr() + start // size * vector.itemsize
        is_aligned = not any(row[column] & 15 for column, (_, size) in vectors.items() if size == 1)
        for place, state in enumerate(buffer.states[full:], full):
            row[columns.STATES[place]] = state.data_ptr() + i * state.itemsize
        shape, stride = buffer.shapes[i]
        found.append(TensorRow(index, stride, shape, row, is_aligned))
    return found


_DTYPE: Final = attrgetter("dtype")
_FIFTEEN: Final = (15).__and__
