"""Capture: forward, backward and step of an engine as one CUDA graph, which skips by data."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from halfpeak.casting.opcasts import OpCasts
from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError
from halfpeak.core.outcome import StepResult
from halfpeak.engine.served import fits
from halfpeak.engine.slots import Phase
from halfpeak.fused.optimizer import FusedOptimizer
from halfpeak.fused.roads.tables import Tables
from halfpeak.parts.verdict import is_multi_rank

if TYPE_CHECKING:
    from halfpeak.engine.engine import Engine

LossFunction = Callable[..., Tensor]
"""From inputs to a loss: what stands inside ``with engine.forward()``."""

WARM_UPS = 3
"""Iterations before the capture, in which libraries allocate what they keep. None of them moves anything."""


class CapturedStep(NamedTuple):
    """What a replay leaves, in the same tensors each time: read or copy them before the next one.

    Attributes:
        loss: as the loss function returned it.  # f[]
        result: of the step.
    """

    loss: Tensor
    result: StepResult


class Captured:
    """A whole training step as one launch. Made by :meth:`halfpeak.Engine.capture`.

    Learning rates and other hyper-parameters, and the loss scale, are data: what they are before a call holds in it. A
    gradient that is not finite skips the step as always. Hooks of optimizers and modules do not run, and nothing else in
    Python does: whatever the loss function decided while it was captured stays decided.
    """

    def __init__(
        self,
        engine: Engine,
        graph: torch.cuda.CUDAGraph,
        inputs: Sequence[Tensor],
        cells: Sequence[Tensor],
        tables: Tables,
        step: CapturedStep,
    ) -> None:
        self._engine = engine
        self._graph = graph
        self._inputs = inputs
        self._cells = cells
        self._tables = tables
        self._step = step

    def __call__(self, *inputs: Tensor) -> CapturedStep:
        """Train one step on ``inputs``, which are copied to where the graph reads them. Does not wait for the device.

        Raises:
            ConfigError: inputs of other shapes or dtypes than those it was captured with.
            OrderError: a window is open; or parameters or optimizer states have been replaced, so that the graph would
                write to where they were: capture again.
            LossScaleCollapse: gradients stay non-finite and the scale cannot fall any more. It is noticed a few calls late.
        """
        engine = self._engine
        _check_inputs(self._inputs, inputs)
        _require_closed(engine)
        optimizer = _optimizer_of(engine)
        if not optimizer.lies_as(self._tables.pieces, engine.lanes[0].roster().sources):
            raise OrderError(
                "parameters or optimizer states are not where they were when this step was captured; write "
                "engine.capture(...) again"
            )
        if isinstance(engine.casting, OpCasts):
            # They are of the weights before this step.
            engine.casting.clear_cache()
        for place, value in zip(self._inputs, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        _hold(engine, self._cells)
        self._tables.rewrite(optimizer.param_groups)
        self._graph.replay()
        optimizer.note_replay()
        engine.journal.index += 1
        engine.phases.look_after_replay(engine.lanes)
        return self._step


def capture(engine: Engine, loss_function: LossFunction, inputs: Sequence[Tensor]) -> Captured:
    """See :meth:`halfpeak.Engine.capture`."""
    _require_device(engine.device)
    _check_engine(engine)
    _require_closed(engine)
    for given in inputs:
        if not isinstance(given, Tensor):
            raise ConfigTypeError(
                f"the inputs of a captured step are tensors, not {type(given).__name__}; put everything else into the "
                "function"
            )
    engine.lanes[0].drop()
    places = [given.detach().to(engine.device, copy=True) for given in inputs]
    cells = _cells(engine)
    with _as_before(engine), _aside(engine.device):
        for _ in range(WARM_UPS):
            _iterate(engine, loss_function, places, withhold=True)
            # To a static scale a withheld step is trouble, and the next would not launch what the graph will hold.
            _hold(engine, cells, copy=False)
            engine.phases.settle_trouble()
    optimizer = _optimizer_of(engine)
    if optimizer.road != "triton":
        raise ConfigError(
            f"a captured step needs an optimizer on road='triton', and {type(optimizer).__name__} is on "
            f"{optimizer.road!r} here; install triton, and keep all parameters on one device in float32 or lower"
        )
    return _record(engine, loss_function, places)


def _record(engine: Engine, loss_function: LossFunction, places: list[Tensor]) -> Captured:
    optimizer, index = _optimizer_of(engine), engine.journal.index
    cells = _cells(engine)
    try:
        with _recording(engine.device) as graph:
            step = _iterate(engine, loss_function, places, withhold=False)
            after = _cells(engine)
            moved = [(cell, new) for cell, new in zip(cells, after, strict=True) if new is not cell]
            torch._foreach_copy_([cell for cell, _ in moved], [new for _, new in moved])
    finally:
        # What was recorded has not been run. The warm-up has made the tables, which a capture could not send.
        tables = optimizer.surrender()
        _hold(engine, cells, copy=False)
        engine.journal.index = index
    assert tables is not None
    tables.flush()
    result = step.result._replace(scale=engine.scale)
    return Captured(engine, graph, places, cells, tables, step._replace(result=result))


@contextmanager
def _aside(device: torch.device) -> Generator[None]:
    """On a stream of its own, where libraries make what they need for a capture."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream(device).wait_stream(side)


@contextmanager
def _recording(device: torch.device) -> Generator[torch.cuda.CUDAGraph]:
    """What is launched inside is not run but becomes the graph."""
    graph = torch.cuda.CUDAGraph()
    # The stream that torch would take is of the device on which the first graph of the process was captured.
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
        yield graph


def _iterate(
    engine: Engine, loss_function: LossFunction, places: Sequence[Tensor], *, withhold: bool
) -> CapturedStep:
    with engine.forward():
        loss = loss_function(*places)
    engine.backward(loss)
    if withhold:
        # As if another rank had found a gradient that is not finite: everything runs and nothing moves.
        engine.lanes[0].found_inf = torch.ones_like(engine.lanes[0].found_inf)
    return CapturedStep(loss.detach(), engine.step())


@contextmanager
def _as_before(engine: Engine) -> Generator[None]:
    """Afterwards the engine, the buffers of its models and the random generators are as before."""
    cells, index = _cells(engine), engine.journal.index
    buffers = [buffer for model in engine.models for buffer in model.buffers()]
    values = [buffer.detach().clone() for buffer in buffers]
    devices = [engine.device] if engine.device.type == "cuda" else []
    with torch.random.fork_rng(devices, device_type="cuda"):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)
            _hold(engine, cells, copy=False)
            engine.buffers.save()
            engine.journal.index = index


def _cells(engine: Engine) -> list[Tensor]:
    """The tensors of an engine that a step replaces by others."""
    states = [tensor for scaler in engine.scalers for tensor in scaler.state]
    return [*states, engine.journal.taken, engine.journal.skipped, *engine.buffers.saved()]


def _hold(engine: Engine, cells: Sequence[Tensor], *, copy: bool = True) -> None:
    """Let the engine hold ``cells``, with the values that it has, or with ``copy=False`` with those that they have."""
    if copy:
        for cell, value in zip(cells, _cells(engine), strict=True):
            if cell is not value:
                cell.copy_(value)
    rest = iter(cells)
    for scaler in engine.scalers:
        scaler.state = type(scaler.state)(*(next(rest) for _ in scaler.state))
    engine.journal.hold(next(rest), next(rest))
    engine.buffers.hold(list(rest))


def _optimizer_of(engine: Engine) -> FusedOptimizer:
    optimizer = engine.lanes[0].optimizer
    assert isinstance(optimizer, FusedOptimizer)
    return optimizer


def _require_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(
            f"a step is captured as a CUDA graph, and this engine is on {device}; write engine.forward(), backward and "
            "step there, inside torch.compile if calls are what it costs"
        )


def _check_engine(engine: Engine) -> None:
    if len(engine.lanes) != 1 or not isinstance(engine.lanes[0].optimizer, FusedOptimizer):
        names = ", ".join(type(lane.optimizer).__name__ for lane in engine.lanes)
        raise ConfigError(
            f"a captured step has one optimizer of halfpeak.fused, not {names}; write FusedAdamW(...)"
        )
    if len(engine.scalers) != 1 or engine.plan.accumulation.every != 1:
        raise ConfigError(
            f"a captured step has one loss and one backward pass, not num_losses={len(engine.scalers)} and "
            f"accumulate={engine.plan.accumulation.every}; average over the micro-batches inside the loss function"
        )
    if not fits(engine.plan.clip):
        raise ConfigError(
            f"clip={engine.plan.clip!r} cannot be captured: what it does in Python would happen once; write clip=1.0 "
            "(the 2-norm) or no clip"
        )
    if is_multi_rank() or not engine.phases.verdict.local:
        raise ConfigError(
            "a step of several ranks cannot be captured: their collectives would be replayed without agreement on who takes "
            "part; capture in runs of one rank"
        )


def _require_closed(engine: Engine) -> None:
    if any(lane.phase is not Phase.CLEAN or lane.is_stepping for lane in engine.lanes):
        raise OrderError(
            "a captured step is a whole one, and a window is open; write engine.step() or engine.abort() before it"
        )


def _check_inputs(places: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    forms = [(tuple(place.shape), place.dtype) for place in places]
    given = [(tuple(value.shape), value.dtype) for value in inputs]
    if forms != given:
        raise ConfigError(
            f"this step was captured with inputs {forms}, not {given}; capture one for each shape"
        )
