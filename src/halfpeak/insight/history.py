"""History: the scalars of every step, copied to the host without waiting, and the files that they are written to."""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from halfpeak.checkpoint.temporary import open_to_append, write_text
from halfpeak.core.errors import ConfigError
from halfpeak.core.extras import needs_extra
from halfpeak.core.finite_json import finite_json
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import is_float_sized
from halfpeak.ops.async_scalar import AsyncCopy

Row = dict[str, Any]
"""The values of one step by name, as plain numbers."""


class Sink(Protocol):
    """A destination of rows, such as a file."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows, which come in the order of their steps."""
        ...

    def close(self) -> None:
        """Finish: no more rows follow."""
        ...


class History:
    """Records device scalars per step without waiting, and returns them when they have arrived on the host.

    A step's scalars are copied into one small tensor on the device, so the engine may reuse its own tensors. After
    ``every`` steps one copy to the host starts. The first call of :meth:`record` after its arrival returns the rows: on
    the CPU the same call, on an accelerator usually the next. :meth:`read` waits. Returned rows are not kept.

    Args:
        every: the number of steps per copy to the host.

    Raises:
        ConfigError: ``every`` is below one.

    >>> history = History(every=2)
    >>> history.record({"step": 1}, {"loss": torch.tensor(0.5)})
    []
    >>> history.record({"step": 2}, {"loss": torch.tensor(0.25)})
    [{'step': 1, 'loss': 0.5}, {'step': 2, 'loss': 0.25}]
    """

    def __init__(self, sinks: Sequence[Sink] = (), *, every: int = 1) -> None:
        if every < 1:
            raise ConfigError(f"every={short_repr(every)} must be 1 or more")
        self._sinks = tuple(sinks)
        self._every = every
        self._pending: list[tuple[Row, tuple[str, ...], Tensor | None]] = []
        self._sent: deque[_Batch] = deque()

    def record(self, known: Row, scalars: Mapping[str, Tensor]) -> list[Row]:
        """Record one step and return the rows that have arrived by now. Does not wait.

        Args:
            known: values that are on the host already.
            scalars: float scalars on the device; rows hold them rounded to float32.  # each f[]
        """
        stacked = torch.stack([value.detach().float() for value in scalars.values()]) if scalars else None
        self._pending.append((known, tuple(scalars), stacked))
        if len(self._pending) >= self._every:
            self._send()
        rows: list[Row] = []
        while self._sent and self._sent[0].has_arrived():
            rows += self._sent.popleft().rows()
        return self._hand_out(rows)

    def read(self) -> list[Row]:
        """Wait for the device, write the remaining rows to every sink, and return them."""
        self._send()
        rows = [row for batch in self._sent for row in batch.rows()]
        self._sent.clear()
        return self._hand_out(rows)

    def close(self) -> None:
        """Write the remaining rows and close every sink. Waits for the device."""
        self.read()
        for sink in self._sinks:
            sink.close()

    def _send(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            vectors = [stacked for _, _, stacked in pending if stacked is not None]
            known = [(row, names) for row, names, _ in pending]
            self._sent.append(_Batch(known, AsyncCopy(torch.cat(vectors)) if vectors else None))

    def _hand_out(self, rows: list[Row]) -> list[Row]:
        if rows:
            for sink in self._sinks:
                sink.write(rows)
        return rows


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows whose scalars are being copied to the host."""

    known: list[tuple[Row, tuple[str, ...]]]
    copy: AsyncCopy | None

    def has_arrived(self) -> bool:
        return self.copy is None or self.copy.is_ready()

    def rows(self) -> list[Row]:
        numbers = iter(() if self.copy is None else self.copy.read().tolist())
        return [{**row, **{name: next(numbers) for name in names}} for row, names in self.known]


class JsonLines:
    """Writes one JSON object per line. Non-finite values become null, which every JSON reader accepts.

    Args:
        after: if given, first drop lines of later steps, because a resumed run writes these again.
    """

    def __init__(self, path: Path, *, after: int | None = None) -> None:
        has_rows = after is not None and path.is_file()
        kept = [row for row in read_rows(path) if row["step"] <= after] if has_rows else []
        write_text(path, "".join(map(finite_json, kept)))
        self._file = open_to_append(path)

    def write(self, rows: Sequence[Row]) -> None:
        """Append and flush."""
        self._file.writelines(map(finite_json, rows))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Writes every number of a row as a TensorBoard event under its name.

    Args:
        after: if given, hide events of later steps that an earlier writer logged.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, after: int | None = None) -> None:
        with needs_extra(), warnings.catch_warnings():
            # Its dependencies deprecate each other at import, which a training script cannot change.
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(folder), purge_step=None if after is None else after + 1)

    def write(self, rows: Sequence[Row]) -> None:
        """Add one point per number."""
        for row in rows:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def read_rows(path: Path) -> list[Row]:
    """The rows of a :class:`JsonLines` file. Only numbers and nulls are read, and only rows with an integer ``step``.

    The first line that is not JSON ends the reading, such as a last line that a killed writer left unfinished.
    """
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if isinstance(row, dict):
            numbers = {name: value for name, value in row.items() if value is None or is_float_sized(value)}
            if isinstance(numbers.get("step"), int):
                rows.append(numbers)
    return rows
