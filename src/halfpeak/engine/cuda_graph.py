"""Capture: forward, backward and step of an engine as one CUDA graph, whose kernels skip a step by ``found_inf``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError
from halfpeak.core.schedule import NONFINITE_LOSS
from halfpeak.core.step_result import StepResult
from halfpeak.engine.fused_step import calls_no_other_code
from halfpeak.engine.step import Step
from halfpeak.fused.backends.triton_tables import AddressTables
from halfpeak.fused.base import FusedOptimizer
from halfpeak.parts.clip import is_by_norm
from halfpeak.parts.found_inf import is_multi_rank

Iterate = Callable[[Sequence[Tensor], bool], "CapturedStep"]
"""Runs forward, backward and step of an engine on inputs; with True the step is skipped, by :func:`withhold`."""

WARM_UPS = 3
"""Iterations before the capture, in which libraries allocate persistent memory. Each skips its step."""


class CapturedStep(NamedTuple):
    """The result of a replay, in the same tensors each time: read or copy them before the next replay.

    Attributes:
        loss: as the loss function returned it.  # f[]
        result: of the step.
    """

    loss: Tensor
    result: StepResult


@dataclass(frozen=True, eq=False)
class CapturedFunction:
    """A whole training step as one launch. Made by :meth:`halfpeak.Engine.capture`.

    Each call uses the current learning rates, other hyper-parameters and loss scale. A gradient that is not finite
    skips the step as always. A replay runs no hooks of optimizers and modules and no other Python, so branches that the
    loss function took during the capture are fixed.
    """

    _run: Step
    _tell: Callable[[StepResult], None]
    _graph: torch.cuda.CUDAGraph
    _inputs: Sequence[Tensor]
    _static_state: Sequence[Tensor]
    _tables: AddressTables
    _step: CapturedStep

    def __call__(self, *inputs: Tensor) -> CapturedStep:
        """Train one step on ``inputs``, which are copied into the graph's input tensors. Does not wait for the device.

        Raises:
            ConfigError: the inputs differ in shapes or dtypes from the inputs of the capture.
            OrderError: a window is open; or parameters or optimizer states were replaced, so the graph would write to
                their old memory: capture again.
            LossScaleCollapse: gradients stay non-finite and the scale cannot fall any more. Raised a few calls late.
        """
        run = self._run
        _check_inputs(self._inputs, inputs)
        _require_closed(run)
        optimizer = _optimizer_of(run)
        if not optimizer.matches_layout(self._tables.slices, run.parts.windows[0].weights):
            raise OrderError(
                "parameters or optimizer states are not where they were when this step was captured; write "
                "engine.capture(...) again"
            )
        if run.parts.op_casts is not None:
            # The cached casts are of the weights from before this step.
            run.parts.op_casts.clear_cache()
        for place, value in zip(self._inputs, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        _use(run, self._static_state)
        self._tables.rewrite(optimizer.param_groups)
        self._graph.replay()
        run.counters.micro_step += 1
        self._tell(self._step.result)
        run.report.poll()
        if run.report.is_exhausted:
            raise run.report.error(run.parts.windows)
        return self._step


def capture(
    run: Step, iterate: Iterate, inputs: Sequence[Tensor], tell: Callable[[StepResult], None]
) -> CapturedFunction:
    """See :meth:`halfpeak.Engine.capture`.

    Args:
        run: of the engine.
        iterate: see :data:`Iterate`.
        inputs: examples.
        tell: called with the result of each replay.
    """
    _require_device(run.parts.device)
    _check_engine(run)
    _require_closed(run)
    for given in inputs:
        if not isinstance(given, Tensor):
            raise ConfigTypeError(
                f"the inputs of a captured step are tensors, not {type(given).__name__}; put everything else into the "
                "function"
            )
    _require_no_graph(run)
    places = [given.detach().to(run.parts.device, copy=True) for given in inputs]
    static_state = _static_state(run)
    with _as_before(run), _on_side_stream(run.parts.device):
        for _ in range(WARM_UPS):
            iterate(places, True)
            # With a static scale each skipped step counts as "the scale cannot fall". Reset the counter, because the
            # next iteration would otherwise take the slow path and record other kernels.
            _use(run, static_state, copy=False)
            _require_loose(run)
    optimizer = _optimizer_of(run)
    if optimizer.backend != "triton":
        raise ConfigError(
            f"a captured step needs an optimizer on backend='triton', and {type(optimizer).__name__} is on "
            f"{optimizer.backend!r} here; install triton, and keep all parameters on one device in float32 or lower"
        )
    return _record(run, iterate, places, tell)


def _record(
    run: Step, iterate: Iterate, places: list[Tensor], tell: Callable[[StepResult], None]
) -> CapturedFunction:
    optimizer, micro_step = _optimizer_of(run), run.counters.micro_step
    static_state = _static_state(run)
    try:
        with _recording(run.parts.device) as graph:
            step = iterate(places, False)
            after = _static_state(run)
            moved = [(cell, new) for cell, new in zip(static_state, after, strict=True) if new is not cell]
            torch._foreach_copy_([cell for cell, _ in moved], [new for _, new in moved])
    finally:
        # Recorded work has not run, so the counters go back. The warm-up made the tables: a capture cannot send them.
        tables = optimizer.detach_tables()
        _use(run, static_state, copy=False)
        run.parts.stats.end_step(False)
        run.counters.micro_step = micro_step
    assert tables is not None
    tables.flush()
    result = step.result._replace(scale=run.scalers[0].state.scale)
    return CapturedFunction(run, tell, graph, places, static_state, tables, step._replace(result=result))


@contextmanager
def _on_side_stream(device: torch.device) -> Generator[None]:
    """Run the body on a separate stream, where libraries allocate what a capture needs."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        torch.cuda.current_stream(device).wait_stream(side)


@contextmanager
def _recording(device: torch.device) -> Generator[torch.cuda.CUDAGraph]:
    """Record the launches of the body into a graph, without running them."""
    graph = torch.cuda.CUDAGraph()
    # By default torch takes a stream of the device on which the process captured its first graph.
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
        yield graph


def withhold(run: Step) -> None:
    """Make the coming step skip, as if the loss were not finite: everything else runs."""
    for window in run.parts.windows:
        for scaler in (*window.losses, *(window.held.losses if window.held else ())):
            scale = scaler.state.scale
            window.note(scaler, torch.full_like(scale, NONFINITE_LOSS), scale)


@contextmanager
def _as_before(run: Step) -> Generator[None]:
    """Restore the engine, the buffers of its models and the random generators after the body."""
    static_state, micro_step = _static_state(run), run.counters.micro_step
    buffers = [buffer for model in run.parts.models for buffer in model.buffers()]
    values = [buffer.detach().clone() for buffer in buffers]
    devices = [run.parts.device] if run.parts.device.type == "cuda" else []
    with torch.random.fork_rng(devices, device_type="cuda"):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)
            _use(run, static_state, copy=False)
            run.parts.stats.end_step(False)
            run.counters.micro_step = micro_step


def _static_state(run: Step) -> list[Tensor]:
    """The tensors of an engine that an ordinary step replaces by new ones."""
    states = [tensor for scaler in run.scalers for tensor in scaler.state]
    return [*states, run.counters.num_steps, run.counters.num_skipped]


def _use(run: Step, static_state: Sequence[Tensor], *, copy: bool = True) -> None:
    """Make the engine use ``static_state``, filled with the engine's values, or unchanged with ``copy=False``."""
    if copy:
        for cell, value in zip(static_state, _static_state(run), strict=True):
            if cell is not value:
                cell.copy_(value)
    rest = iter(static_state)
    for scaler in run.scalers:
        scaler.state = type(scaler.state)(*(next(rest) for _ in scaler.state))
    counters = run.counters
    counters.num_steps, counters.num_skipped = next(rest), next(rest)


def _require_loose(run: Step) -> None:
    """Wait for the count of overflows that could not lower the scale.

    Raises:
        OrderError: a loss scale is stuck or near its limit, so the host takes part in the next step.
    """
    for _ in range(2):
        # The first poll is ignored if an earlier copy is still on its way.
        torch.accelerator.synchronize(run.parts.device)
        run.report.poll()
    torch.accelerator.synchronize(run.parts.device)
    if run.report.num_stuck > 0 or run.report.is_near:
        raise OrderError(
            "the loss scale cannot fall and the last gradients were not finite; call engine.step() without the captured "
            "graph until a step is not skipped"
        )


def _optimizer_of(run: Step) -> FusedOptimizer:
    optimizer = run.parts.optimizers[0]
    assert isinstance(optimizer, FusedOptimizer)
    return optimizer


def _require_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(
            f"a step is captured as a CUDA graph, and this engine is on {device}; write engine.forward(), backward and "
            "step there, inside torch.compile if calls are what it costs"
        )


def _check_engine(run: Step) -> None:
    if len(run.parts.optimizers) != 1 or not isinstance(run.parts.optimizers[0], FusedOptimizer):
        names = ", ".join(type(optimizer).__name__ for optimizer in run.parts.optimizers)
        raise ConfigError(
            f"a captured step has one optimizer of halfpeak.fused, not {names}; write FusedAdamW(...)"
        )
    if not calls_no_other_code(optimizer := _optimizer_of(run)):
        raise ConfigError(
            f"a captured step calls neither hooks of an optimizer nor a step of its own, and this {type(optimizer).__name__} "
            "has one; take it away, or write engine.forward(), engine.backward(loss) and engine.step()"
        )
    if len(run.scalers) != 1 or run.config.accumulation.every != 1:
        raise ConfigError(
            f"a captured step has one loss and one backward pass, not num_losses={len(run.scalers)} and "
            f"accumulate={run.config.accumulation.every}; average over the micro-batches inside the loss function"
        )
    if not is_by_norm(run.config.clip):
        raise ConfigError(
            f"clip={run.config.clip!r} cannot be captured: what it does in Python would happen once; write clip=1.0 "
            "(the 2-norm) or no clip"
        )
    if is_multi_rank() or not run.reducer.is_local:
        raise ConfigError(
            "a step of several ranks cannot be captured: their collectives would be replayed without agreement on who takes "
            "part; capture in runs of one rank"
        )


def _require_closed(run: Step) -> None:
    if run.parts.has_gradients():
        raise OrderError(
            "a captured step is a whole one, and a window is open; write engine.step() or engine.abort() before it"
        )


def _require_no_graph(run: Step) -> None:
    """A node that accumulates a gradient belongs to the stream on which it was made, and lives as long as a graph with it.

    Raises:
        OrderError: such a graph is alive; the capture, on another stream, cannot wait for that stream.
    """
    leaves = [leaf for window in run.parts.windows for leaf in window.weights if leaf.requires_grad]
    for leaf in leaves:
        _notes_of_accumulator(leaf)[__name__] = True
    # A node that nothing else refers to is gone by now, and this makes a new one.
    if any(_notes_of_accumulator(leaf).pop(__name__, False) for leaf in leaves):
        raise OrderError(
            "a loss or output of an earlier forward pass, or DistributedDataParallel, still refers to a graph that belongs to "
            "another CUDA stream than the one that captures; write `del loss` before engine.capture(...)"
        )


def _notes_of_accumulator(leaf: Tensor) -> dict[str, Any]:
    return cast(Any, get_gradient_edge(leaf).node).metadata


def _check_inputs(places: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    forms = [(tuple(place.shape), place.dtype) for place in places]
    given = [(tuple(value.shape), value.dtype) for value in inputs]
    if forms != given:
        raise ConfigError(
            f"this step was captured with inputs {forms}, not {given}; capture one for each shape"
        )
