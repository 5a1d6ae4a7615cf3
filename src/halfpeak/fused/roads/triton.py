"""The Triton road: three launches for a whole step where all parameters are of one kind, and none that waits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfpeak.core.schedule import ScaleState
from halfpeak.fused.books import Account, Books
from halfpeak.fused.layout import Piece
from halfpeak.fused.roads.base import DeviceRoad, Moves, Reading
from halfpeak.fused.roads.settings import settings_of
from halfpeak.fused.roads.tables import Kind, Tables
from halfpeak.ops.triton import kernels


class _Measured(NamedTuple):
    """What was read of the gradients.

    Attributes:
        factor: what they were multiplied by.                          # f32[]
        squares: of each program.                                      # f32[programs]
        flags: of each program.                                        # i32[programs]
        each: of each chunk, for kinds whose rule takes norms of it.   # f32[chunks]
    """

    factor: Tensor
    squares: Tensor
    flags: Tensor
    each: dict[Kind, Tensor]


class _Ready(NamedTuple):
    """The numbers of a step that has been accounted for, and what they were worked out from."""

    moves: Moves
    found_inf: Tensor
    hyper: Tensor
    rows: Tensor
    numbers: Tensor
    measured: _Measured | None


class TritonRoad(DeviceRoad):
    """Kernels of our own over tables of addresses: gradients are read where autograd has left them.

    A step that an engine accounts for is measure, control, update; one that it does not is control, update. Each kind of
    parameter (dtypes, rule) has a measure and an update of its own. NovoGrad measures in any case and has a launch more,
    for its norms. LAMB measures where it clips, and takes three launches for an update with trust.

    Args:
        device: where all parameters are.
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self._kernels = kernels()
        self.device = device
        self._tables: Tables | None = None
        self._ready: _Ready | None = None
        self._zero = torch.zeros((), device=device)
        self._no_rows = torch.empty((0, 3), dtype=torch.int64, device=device)
        self._no_hyper = torch.empty((0, self._kernels.HYPER), dtype=torch.float64, device=device)

    def measure(self, pieces: Sequence[Piece], grads: Sequence[Tensor | None], factor: Tensor) -> Reading:
        """See :class:`~halfpeak.fused.roads.base.DeviceRoad`."""
        with self._there():
            moves = Moves(pieces, (), grads, factor, None)
            measured = self._read(self._tables_for(pieces, grads), moves)
            floats, _, _ = self._control(moves, measured, self._no_rows, self._no_hyper)
            return Reading(floats[3], floats[0])

    def account(self, moves: Moves, books: Books) -> Account | None:
        """See :class:`~halfpeak.fused.roads.base.DeviceRoad`."""
        with self._there():
            tables = self._tables_for(moves.pieces, moves.grads)
            measured = self._read(tables, moves)
            rows, hyper = tables.rows(moves.groups), tables.hyper(moves.groups)
            moves = moves._replace(found_inf=books.found_inf)
            floats, ints, numbers = self._control(moves, measured, rows, hyper, books)
        found_inf, norm, factor, _, scale, stuck = floats.unbind()
        clean, grace, patience, taken, skipped = ints.unbind()
        self._ready = _Ready(moves._replace(factor=factor), found_inf, hyper, rows, numbers, measured)
        state = ScaleState(scale, clean, grace, patience)
        return Account(found_inf, norm, factor, state, stuck, taken, skipped)

    def move(self, moves: Moves) -> None:
        """See :class:`~halfpeak.fused.roads.base.DeviceRoad`."""
        with self._there():
            tables = self._tables_for(moves.pieces, moves.grads)
            ready, self._ready = self._made_ready(tables, moves), None
            counters = len(ready.rows)
            for kind, chunks in tables.chunks(moves.grads):
                self._update(kind, chunks, ready, counters)
                # The first launch has counted the step.
                counters = 0

    def _made_ready(self, tables: Tables, moves: Moves) -> _Ready:
        """The numbers of a step: those of its account, if it comes to what was accounted for."""
        ready = self._ready
        rows, hyper = tables.rows(moves.groups), tables.hyper(moves.groups)
        if (
            ready is not None
            and ready.moves.factor is moves.factor
            and ready.found_inf is moves.found_inf
            # A hook may have changed them since.
            and ready.moves.limit == moves.limit
            and ready.hyper is hyper
            and ready.rows is rows
        ):
            return ready
        measured = None
        if moves.limit is not None or any(kind.settings.norm for kind, _ in tables.chunks(moves.grads)):
            measured = self._read(tables, moves)
        floats, _, numbers = self._control(moves, measured, rows, hyper, judges=False)
        return _Ready(moves, floats[0], hyper, rows, numbers, measured)

    def _update(self, kind: Kind, chunks: Any, ready: _Ready, counters: int) -> None:
        rule = kind.settings
        form = self._kernels.Form(
            kind.weight, kind.low, rule.rule, rule.option, rule.other, rule.master, rule.moments
        )
        if rule.norm:
            assert ready.measured is not None
            each, factor = ready.measured.each[kind], ready.measured.factor
            largest = rule.norm == "largest"
            self._kernels.norm(chunks, ready.numbers, factor, ready.found_inf, each, largest=largest)
        update = self._kernels.trusting_update if rule.trusts else self._kernels.update
        update(chunks, ready.numbers, ready.found_inf, ready.rows, counters=counters, form=form)

    def forget(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.DeviceRoad`."""
        self._ready = None
        if self._tables is not None:
            self._tables.forget()

    def clear(self) -> None:
        """See :class:`~halfpeak.fused.roads.base.DeviceRoad`."""
        self._ready = None
        self._tables = None

    def surrender(self) -> Tables | None:
        """The tables, to whoever has captured launches that read them; further steps make new ones."""
        tables = self._tables
        self.clear()
        return tables

    def _tables_for(self, pieces: Sequence[Piece], grads: Sequence[Tensor | None]) -> Tables:
        if self._tables is None or not self._tables.fits(pieces, grads):
            self._tables = Tables(self._kernels, pieces, grads)
        return self._tables

    def _read(self, tables: Tables, moves: Moves) -> _Measured:
        """Read all gradients once. Whatever takes norms of them gets what it needs on the way."""
        launches = tables.chunks(moves.grads)
        many = sum(chunks.programs() for _, chunks in launches)
        squares = torch.empty(many, dtype=torch.float32, device=self.device)
        flags = torch.empty(many, dtype=torch.int32, device=self.device)
        found: dict[Kind, Tensor] = {}
        factor, first = moves.factor.to(self.device), 0
        for kind, chunks in launches:
            each, norm = None, kind.settings.norm
            if norm:
                each = found[kind] = torch.empty(len(chunks.chunks), dtype=torch.float32, device=self.device)
            self._kernels.measure(chunks, factor, squares[first:], flags[first:], each, norm)
            first += chunks.programs()
        return _Measured(factor, squares, flags, found)

    def _control(
        self,
        moves: Moves,
        measured: _Measured | None,
        rows: Tensor,
        hyper: Tensor,
        books: Books | None = None,
        *,
        judges: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        floats = torch.empty(6, dtype=torch.float32, device=self.device)
        ints = torch.empty(5, dtype=torch.int32, device=self.device)
        width = self._kernels.NUMBERS
        numbers = torch.empty((len(rows), width), dtype=torch.float32, device=self.device)
        rule = settings_of(moves.pieces[0].rule)
        assert rule is not None
        self._kernels.control(
            None if measured is None else (measured.squares, measured.flags),
            moves.factor.to(self.device),
            self._zero if moves.found_inf is None else moves.found_inf.to(self.device),
            rows,
            hyper,
            numbers,
            floats,
            ints,
            rule=rule.rule,
            judges=judges,
            limit=None if books is None else books.limit,
            own_limit=moves.limit,
            schedule=None if books is None else self._schedule(books),
        )
        return floats, ints, numbers

    def _schedule(self, books: Books) -> Any:
        config, state = books.config, books.state
        return self._kernels.Schedule(
            config.growth,
            config.backoff,
            config.floor,
            config.ceiling,
            config.interval,
            config.hysteresis,
            config.dynamic,
            config.refill == "clean",
            (state.scale, state.clean, state.grace, state.stuck, books.taken, books.skipped),
        )

    def _there(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
