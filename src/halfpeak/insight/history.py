"""History: the scalars of every step, kept on the device until they are read, and the files they go to."""

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
"""One step's values by name, plain numbers."""


class Sink(Protocol):
    """Where rows go, such as a file."""

    def write(self, rows: Sequence[Row]) -> None:
        """Take rows, in the order of their steps."""
        ...

    def close(self) -> None:
        """Finish: no more rows will come."""
        ...


class History:
    """Records device scalars per step without waiting, and hands them out when they have arrived on the host.

    A step's scalars are copied into one small tensor on the device, so an engine may reuse its own. After ``every`` steps
    they start for the host together, and a later call of :meth:`record` that finds them there hands them out: on the CPU
    the same call, on an accelerator usually the next. :meth:`read` waits for them. Rows that were handed out are
    not kept.

    Args:
        every: after so many steps rows start for the host.

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
        """Remember one step; return the rows that have arrived by now, usually none. Does not wait.

        Args:
            known: values that are on the host already.
            scalars: float scalars on the device; a row gives them as float32 holds them.  # each f[]
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
        """Wait for the device, give the rows that are left to every sink, and return them."""
        self._send()
        rows = [row for batch in self._sent for row in batch.rows()]
        self._sent.clear()
        return self._hand_out(rows)

    def close(self) -> None:
        """Read what is left and close every sink. Waits for the device."""
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
    """Rows whose scalars are on their way."""

    known: list[tuple[Row, tuple[str, ...]]]
    copy: AsyncCopy | None

    def has_arrived(self) -> bool:
        return self.copy is None or self.copy.is_ready()

    def rows(self) -> list[Row]:
        numbers = iter(() if self.copy is None else self.copy.read().tolist())
        return [{**row, **{name: next(numbers) for name in names}} for row, names in self.known]


class JsonLines:
    """One JSON object per line. A value that is not finite is written as null, which every reader takes.

    Args:
        after: when given, lines of later steps are dropped first: a resumed run writes them again.
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
        after: when given, what an earlier writer logged for later steps is hidden.

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
    """The rows of a :class:`JsonLines` file, with the numbers in them.

    What :class:`JsonLines` did not write is left out: a last line that a killed writer left unfinished ends the reading.
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
