"""History: the scalars of every step, kept on the device until somebody looks."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from halfpeak.core.errors import ConfigError
from halfpeak.parts.transfer import Transfer

Row = dict[str, Any]
"""One step's values by name, plain numbers."""


class Sink(Protocol):
    """Somewhere that rows go."""

    def write(self, rows: Sequence[Row]) -> None:
        """Take rows, in the order of their steps."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class History:
    """Records device scalars per step without waiting, and hands them out when they have arrived on the host.

    A step's scalars are copied into one small tensor on the device, so an engine may reuse its own. After ``every`` steps
    they start for the host together, and a later call of :meth:`record` that finds them there hands them out: on the CPU
    the same call, on an accelerator usually the next. Who wants them at once calls :meth:`read`. What was handed out is
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
            raise ConfigError(f"every={every!r} must be 1 or more")
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
            self._sent.append(_Batch(known, Transfer(torch.cat(vectors)) if vectors else None))

    def _hand_out(self, rows: list[Row]) -> list[Row]:
        if rows:
            for sink in self._sinks:
                sink.write(rows)
        return rows


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows whose scalars are on their way."""

    known: list[tuple[Row, tuple[str, ...]]]
    transfer: Transfer | None

    def has_arrived(self) -> bool:
        return self.transfer is None or self.transfer.has_arrived()

    def rows(self) -> list[Row]:
        numbers = iter(() if self.transfer is None else self.transfer.numbers())
        return [{**row, **{name: next(numbers) for name in names}} for row, names in self.known]


class JsonLines:
    """One JSON object per line. A value that is not finite is written as null, which every reader takes.

    Args:
        after: when given, lines of later steps are dropped first: a resumed run writes them again.
    """

    def __init__(self, path: Path, *, after: int | None = None) -> None:
        if after is not None and path.exists():
            kept = [row for row in read_rows(path) if row["step"] <= after]
            replacement = path.with_suffix(".part")
            replacement.write_text("".join(map(_line, kept)), encoding="utf-8")
            os.replace(replacement, path)
        self._file = path.open("w" if after is None else "a", encoding="utf-8")

    def write(self, rows: Sequence[Row]) -> None:
        """Append and flush."""
        self._file.writelines(map(_line, rows))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: Path) -> list[Row]:
    """The rows of a :class:`JsonLines` file. A last line that a killed writer left unfinished is ignored."""
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _line(row: Row) -> str:
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"
