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
from halfpeak.fused.roads.tables import Tables
from halfpeak.ops.triton import kernels


class _Ready(NamedTuple):
    """The numbers of a step that has been accounted for, and what they were worked out from."""

    factor: Tensor
    found_inf: Tensor
    hyper: Tensor
    rows: Tensor
    numbers: Tensor


class TritonRoad(DeviceRoad):
    """Kernels of our own over tables of addresses: gradients are read where autograd has left them.

    A step that an engine accounts for is measure, control, update; one that it does not is control, update. Each kind of
    parameter (dtypes, rule) has a measure and an update of its own.

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
            tables = self._tables_for(pieces, grads)
            partials = self._partials(tables, grads, factor)
            floats, _, _ = self._control(pieces, partials, factor, None, self._no_rows, self._no_hyper)
            return Reading(floats[3], floats[0])

    def account(self, moves: Moves, books: Books) -> Account | None:
        """See :class:`~halfpeak.fused.roads.base.DeviceRoad`."""
        with self._there():
            tables = self._tables_for(moves.pieces, moves.grads)
            partials = self._partials(tables, moves.grads, moves.factor)
            rows, hyper = tables.rows(moves.groups), tables.hyper(moves.groups)
            floats, ints, numbers = self._control(
                moves.pieces, partials, moves.factor, books.found_inf, rows, hyper, books
            )
        found_inf, norm, factor, _, scale, stuck = floats.unbind()
        clean, grace, patience, taken, skipped = ints.unbind()
        self._ready = _Ready(factor, found_inf, hyper, rows, numbers)
        state = ScaleState(scale, clean, grace, patience)
        return Account(found_inf, norm, factor, state, stuck, taken, skipped)

    def move(self, moves: Moves) -> None:
        """See :class:`~halfpeak.fused.roads.base.DeviceRoad`."""
        with self._there():
            tables = self._tables_for(moves.pieces, moves.grads)
            rows, hyper = tables.rows(moves.groups), tables.hyper(moves.groups)
            ready, self._ready = self._ready, None
            if (
                ready is not None
                and ready.factor is moves.factor
                and ready.found_inf is moves.found_inf
                # A hook may have changed them since.
                and ready.hyper is hyper
                and ready.rows is rows
            ):
                found_inf, numbers = ready.found_inf, ready.numbers
            else:
                floats, _, numbers = self._control(
                    moves.pieces, None, moves.factor, moves.found_inf, rows, hyper
                )
                found_inf = floats[0]
            counters = len(rows)
            for kind, chunks in tables.chunks(moves.grads):
                rule = settings_of(kind.rule)
                assert rule is not None
                self._kernels.update(
                    chunks,
                    numbers,
                    found_inf,
                    rows,
                    counters=counters,
                    weight=kind.weight,
                    low=kind.low,
                    rule=rule.rule,
                    option=rule.option,
                    other=rule.other,
                )
                # The first launch has counted the step.
                counters = 0

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

    def _partials(
        self, tables: Tables, grads: Sequence[Tensor | None], factor: Tensor
    ) -> tuple[Tensor, Tensor]:
        launches = [chunks for _, chunks in tables.chunks(grads)]
        many = sum(chunks.programs for chunks in launches)
        squares = torch.empty(many, dtype=torch.float32, device=self.device)
        flags = torch.empty(many, dtype=torch.int32, device=self.device)
        first = 0
        for chunks in launches:
            self._kernels.measure(chunks, factor, squares[first:], flags[first:])
            first += chunks.programs
        return squares, flags

    def _control(
        self,
        pieces: Sequence[Piece],
        partials: tuple[Tensor, Tensor] | None,
        factor: Tensor,
        found_inf: Tensor | None,
        rows: Tensor,
        hyper: Tensor,
        books: Books | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        floats = torch.empty(6, dtype=torch.float32, device=self.device)
        ints = torch.empty(5, dtype=torch.int32, device=self.device)
        numbers = torch.empty((len(rows), 8), dtype=torch.float32, device=self.device)
        rule = settings_of(pieces[0].rule)
        assert rule is not None
        self._kernels.control(
            partials,
            factor.to(self.device),
            self._zero if found_inf is None else found_inf.to(self.device),
            rows,
            hyper,
            numbers,
            floats,
            ints,
            rule=rule.rule,
            limit=None if books is None else books.limit,
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
