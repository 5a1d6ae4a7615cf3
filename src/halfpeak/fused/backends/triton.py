"""The Triton backend: three launches for a whole step if all parameters share a launch key, and no wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfpeak.core.schedule import ScaleState
from halfpeak.fused.backends.base import Backend, BackendStep, GradStats
from halfpeak.fused.backends.triton_tables import AddressTables, LaunchKey
from halfpeak.fused.decision import DecisionInputs, StepDecision
from halfpeak.fused.flat.layout import BufferSlice
from halfpeak.ops.triton import kernels


class _Measured(NamedTuple):
    """The result of reading the gradients.

    Attributes:
        multiplier: the factor of the gradients.                              # f32[]
        squares: the sum of squares of each program.                          # f32[programs]
        flags: whether each program has met a gradient that is not finite.    # i32[programs]
        each: a sum or maximum of each chunk, for rules that take norms.      # f32[chunks]
    """

    multiplier: Tensor
    squares: Tensor
    flags: Tensor
    each: dict[LaunchKey, Tensor]


class _Ready(NamedTuple):
    """The results of the control kernel for a step, and the inputs that they were computed from."""

    step: BackendStep
    found_inf: Tensor
    hyper: Tensor
    rows: Tensor
    numbers: Tensor
    measured: _Measured | None


class TritonBackend(Backend):
    """Runs halfpeak's Triton kernels over tables of addresses: gradients are read where autograd has left them.

    A step that was decided before launches measure, control, update; any other step launches control, update. Each
    launch key (dtypes and rule) has its own measure and update. NovoGrad always measures and launches one kernel more,
    for its norms. LAMB measures if it clips, and its update with trust takes three launches.

    Args:
        device: the device of all parameters.
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self._kernels = kernels()
        self.device = device
        self._tables: AddressTables | None = None
        self._ready: _Ready | None = None
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self._no_rows = torch.empty((0, 3), dtype=torch.int64, device=device)
        self._no_hyper = torch.empty((0, self._kernels.HYPER), dtype=torch.float64, device=device)

    def measure(
        self, slices: Sequence[BufferSlice], grads: Sequence[Tensor | None], multiplier: Tensor
    ) -> GradStats:
        with self._there():
            step = BackendStep(slices, (), grads, multiplier, None)
            measured = self._read(self._tables_for(slices, grads), step)
            floats, _, _ = self._control(step, measured, self._no_rows, self._no_hyper)
            return GradStats(floats[3], floats[0])

    def decide(self, step: BackendStep, inputs: DecisionInputs) -> StepDecision | None:
        with self._there():
            tables = self._tables_for(step.slices, step.grads)
            measured = self._read(tables, step)
            rows, hyper = tables.rows(step.groups), tables.hyper(step.groups)
            step = step._replace(found_inf=inputs.found_inf)
            floats, ints, numbers = self._control(step, measured, rows, hyper, inputs)
        found_inf, norm, multiplier, _, scale = floats.unbind()
        *counts, num_steps, num_skipped = ints.unbind()
        self._ready = _Ready(step._replace(multiplier=multiplier), found_inf, hyper, rows, numbers, measured)
        state = ScaleState(scale, *counts)
        return StepDecision(found_inf, norm, multiplier, state, num_steps, num_skipped)

    def prepare(self, step: BackendStep) -> Callable[[], None]:
        return lambda: self._run(step)

    def _run(self, step: BackendStep) -> None:
        with self._there():
            tables = self._tables_for(step.slices, step.grads)
            ready, self._ready = self._made_ready(tables, step), None
            counters = len(ready.rows)
            for key, chunks in tables.chunks(step.grads):
                self._update(key, chunks, ready, counters)
                # Only the first launch counts the step.
                counters = 0

    def _made_ready(self, tables: AddressTables, step: BackendStep) -> _Ready:
        """The numbers of a step: those of :meth:`decide` if nothing has changed since, else new ones."""
        ready = self._ready
        rows, hyper = tables.rows(step.groups), tables.hyper(step.groups)
        if (
            ready is not None
            and ready.step.multiplier is step.multiplier
            and ready.found_inf is step.found_inf
            # A step hook may have changed the clipping or the hyper-parameters.
            and ready.step.max_norm == step.max_norm
            and ready.hyper is hyper
            and ready.rows is rows
        ):
            return ready
        measured = None
        if step.max_norm is not None or any(key.config.norm for key, _ in tables.chunks(step.grads)):
            measured = self._read(tables, step)
        floats, _, numbers = self._control(step, measured, rows, hyper, judges=False)
        return _Ready(step, floats[0], hyper, rows, numbers, measured)

    def _update(self, key: LaunchKey, chunks: Any, ready: _Ready, counters: int) -> None:
        config = key.config
        if config.norm:
            assert ready.measured is not None
            each, multiplier = ready.measured.each[key], ready.measured.multiplier
            largest = config.norm == "largest"
            self._kernels.norm(chunks, ready.numbers, multiplier, ready.found_inf, each, largest=largest)
        update = self._kernels.lamb_trust_update if config.trust else self._kernels.update
        update(chunks, ready.numbers, ready.found_inf, ready.rows, counters=counters, config=config)

    def invalidate_grads(self) -> None:
        self._ready = None
        if self._tables is not None:
            self._tables.invalidate_grads()

    def invalidate_layout(self) -> None:
        self._ready = None
        self._tables = None

    def detach_tables(self) -> AddressTables | None:
        """Hand the tables to a captured graph that reads them; later steps build new tables."""
        tables = self._tables
        self.invalidate_layout()
        return tables

    def _tables_for(self, slices: Sequence[BufferSlice], grads: Sequence[Tensor | None]) -> AddressTables:
        if self._tables is None or not self._tables.fits(slices, grads):
            self._tables = AddressTables(self._kernels, slices, grads)
        return self._tables

    def _read(self, tables: AddressTables, step: BackendStep) -> _Measured:
        """Launch measure for every key, with results per chunk for rules that need norms."""
        launches = tables.chunks(step.grads)
        many = sum(chunks.programs() for _, chunks in launches)
        squares = torch.empty(many, dtype=torch.float32, device=self.device)
        flags = torch.empty(many, dtype=torch.int32, device=self.device)
        found: dict[LaunchKey, Tensor] = {}
        multiplier, first = step.multiplier.to(self.device), 0
        for key, chunks in launches:
            each, norm = None, key.config.norm
            if norm:
                each = found[key] = torch.empty(len(chunks.chunks), dtype=torch.float32, device=self.device)
            self._kernels.measure(chunks, multiplier, squares[first:], flags[first:], each, norm)
            first += chunks.programs()
        return _Measured(multiplier, squares, flags, found)

    def _control(
        self,
        step: BackendStep,
        measured: _Measured | None,
        rows: Tensor,
        hyper: Tensor,
        inputs: DecisionInputs | None = None,
        *,
        judges: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        floats = torch.empty(5, dtype=torch.float32, device=self.device)
        ints = torch.empty(len(ScaleState._fields) + 1, dtype=torch.int32, device=self.device)
        width = self._kernels.NUMBERS
        numbers = torch.empty((len(rows), width), dtype=torch.float32, device=self.device)
        config = step.slices[0].rule.kernel_config()
        assert config is not None
        self._kernels.control(
            None if measured is None else (measured.squares, measured.flags),
            step.multiplier.to(self.device),
            self._zero if step.found_inf is None else step.found_inf.to(self.device),
            rows,
            hyper,
            numbers,
            floats,
            ints,
            rule=config.rule,
            judges=judges,
            max_norm=None if inputs is None else inputs.max_norm,
            own_max_norm=step.max_norm,
            scale=None if inputs is None else inputs.config,
            state=() if inputs is None else (*inputs.state, inputs.num_steps, inputs.num_skipped),
        )
        return floats, ints, numbers

    def _there(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
