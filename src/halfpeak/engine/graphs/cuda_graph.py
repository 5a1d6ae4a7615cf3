"""Capture: forward, backward and step of an engine as one CUDA graph, whose kernels skip a step by ``found_inf``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halfpeak.casting.casts import OpCasts
from halfpeak.core.errors import ConfigError, ConfigTypeError, OrderError
from halfpeak.core.step_result import StepResult
from halfpeak.engine.context import EngineContext, StepEngine
from halfpeak.engine.gradients.fused_grads import reads_grads_itself
from halfpeak.fused.backends.triton_tables import AddressTables
from halfpeak.fused.base import FusedOptimizer
from halfpeak.state.clip import is_by_norm
from halfpeak.state.found_inf import is_multi_rank

LossFunction = Callable[..., Tensor]
"""From inputs to a loss: the body of ``with engine.forward()``."""

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

    _engine: StepEngine
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
        context = self._engine.context
        _check_inputs(self._inputs, inputs)
        _require_closed(context)
        optimizer = _optimizer_of(context)
        if not optimizer.matches_layout(self._tables.slices, context.prepared[0].table().model_params):
            raise OrderError(
                "parameters or optimizer states are not where they were when this step was captured; write "
                "engine.capture(...) again"
            )
        if isinstance(context.casting, OpCasts):
            # The cached casts are of the weights from before this step.
            context.casting.clear_cache()
        for place, value in zip(self._inputs, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        _use(context, self._static_state)
        self._tables.rewrite(optimizer.param_groups)
        self._graph.replay()
        context.masters.forget_values()
        context.record.micro_step += 1
        self._engine.report(self._step.result)
        context.train_step.check_after_replay(context.prepared)
        return self._step


def capture(engine: StepEngine, loss_function: LossFunction, inputs: Sequence[Tensor]) -> CapturedFunction:
    """See :meth:`halfpeak.Engine.capture`."""
    context = engine.context
    _require_device(context.device)
    _check_context(context)
    _require_closed(context)
    for given in inputs:
        if not isinstance(given, Tensor):
            raise ConfigTypeError(
                f"the inputs of a captured step are tensors, not {type(given).__name__}; put everything else into the "
                "function"
            )
    context.prepared[0].drop()
    places = [given.detach().to(context.device, copy=True) for given in inputs]
    static_state = _static_state(context)
    with _as_before(context), _on_side_stream(context.device):
        for _ in range(WARM_UPS):
            _iterate(engine, loss_function, places, withhold=True)
            # With a static scale each skipped step counts as "the scale cannot fall". Reset the counter, because the
            # next iteration would otherwise take the slow path and record other kernels.
            _use(context, static_state, copy=False)
            context.train_step.sync_stuck()
    optimizer = _optimizer_of(context)
    if optimizer.backend != "triton":
        raise ConfigError(
            f"a captured step needs an optimizer on backend='triton', and {type(optimizer).__name__} is on "
            f"{optimizer.backend!r} here; install triton, and keep all parameters on one device in float32 or lower"
        )
    return _record(engine, loss_function, places)


def _record(engine: StepEngine, loss_function: LossFunction, places: list[Tensor]) -> CapturedFunction:
    context = engine.context
    optimizer, micro_step = _optimizer_of(context), context.record.micro_step
    static_state = _static_state(context)
    try:
        with _recording(context.device) as graph:
            step = _iterate(engine, loss_function, places, withhold=False)
            after = _static_state(context)
            moved = [(cell, new) for cell, new in zip(static_state, after, strict=True) if new is not cell]
            torch._foreach_copy_([cell for cell, _ in moved], [new for _, new in moved])
    finally:
        # Recorded work has not run, so the counters go back. The warm-up made the tables: a capture cannot send them.
        tables = optimizer.detach_tables()
        _use(context, static_state, copy=False)
        context.record.micro_step = micro_step
    assert tables is not None
    tables.flush()
    result = step.result._replace(scale=context.scalers[0].state.scale)
    return CapturedFunction(engine, graph, places, static_state, tables, step._replace(result=result))


@contextmanager
def _on_side_stream(device: torch.device) -> Generator[None]:
    """Run the body on a separate stream, where libraries allocate what a capture needs."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream(device).wait_stream(side)


@contextmanager
def _recording(device: torch.device) -> Generator[torch.cuda.CUDAGraph]:
    """Record the launches of the body into a graph, without running them."""
    graph = torch.cuda.CUDAGraph()
    # By default torch takes a stream of the device on which the process captured its first graph.
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
        yield graph


def _iterate(
    engine: StepEngine, loss_function: LossFunction, places: Sequence[Tensor], *, withhold: bool
) -> CapturedStep:
    with engine.forward():
        loss = loss_function(*places)
    engine.backward(loss)
    if withhold:
        # As if another rank had found a non-finite gradient: everything runs, but the step is skipped.
        one = engine.context.prepared[0]
        one.window = one.window._replace(found_inf=torch.ones_like(one.found_inf))
    return CapturedStep(loss.detach(), engine.step())


@contextmanager
def _as_before(context: EngineContext) -> Generator[None]:
    """Restore the engine, the buffers of its models and the random generators after the body."""
    static_state, micro_step = _static_state(context), context.record.micro_step
    buffers = [buffer for model in context.models for buffer in model.buffers()]
    values = [buffer.detach().clone() for buffer in buffers]
    devices = [context.device] if context.device.type == "cuda" else []
    with torch.random.fork_rng(devices, device_type="cuda"):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)
            _use(context, static_state, copy=False)
            context.stats.save()
            context.record.micro_step = micro_step


def _static_state(context: EngineContext) -> list[Tensor]:
    """The tensors of an engine that an ordinary step replaces by new ones."""
    states = [tensor for scaler in context.scalers for tensor in scaler.state]
    return [*states, context.record.num_steps, context.record.num_skipped, *context.stats.saved()]


def _use(context: EngineContext, static_state: Sequence[Tensor], *, copy: bool = True) -> None:
    """Make the engine use ``static_state``, filled with the engine's values, or unchanged with ``copy=False``."""
    if copy:
        for cell, value in zip(static_state, _static_state(context), strict=True):
            if cell is not value:
                cell.copy_(value)
    rest = iter(static_state)
    for scaler in context.scalers:
        scaler.state = type(scaler.state)(*(next(rest) for _ in scaler.state))
    context.record.use_counters(next(rest), next(rest))
    context.stats.use_saved(list(rest))


def _optimizer_of(context: EngineContext) -> FusedOptimizer:
    optimizer = context.prepared[0].optimizer
    assert isinstance(optimizer, FusedOptimizer)
    return optimizer


def _require_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(
            f"a step is captured as a CUDA graph, and this engine is on {device}; write engine.forward(), backward and "
            "step there, inside torch.compile if calls are what it costs"
        )


def _check_context(context: EngineContext) -> None:
    if len(context.prepared) != 1 or not isinstance(context.prepared[0].optimizer, FusedOptimizer):
        names = ", ".join(type(one.optimizer).__name__ for one in context.prepared)
        raise ConfigError(
            f"a captured step has one optimizer of halfpeak.fused, not {names}; write FusedAdamW(...)"
        )
    if not reads_grads_itself(optimizer := _optimizer_of(context)):
        raise ConfigError(
            f"a captured step calls neither hooks of an optimizer nor a step of its own, and this {type(optimizer).__name__} "
            "has one; take it away, or write engine.forward(), engine.backward(loss) and engine.step()"
        )
    if len(context.scalers) != 1 or context.config.accumulation.every != 1:
        raise ConfigError(
            f"a captured step has one loss and one backward pass, not num_losses={len(context.scalers)} and "
            f"accumulate={context.config.accumulation.every}; average over the micro-batches inside the loss function"
        )
    if not is_by_norm(context.config.clip):
        raise ConfigError(
            f"clip={context.config.clip!r} cannot be captured: what it does in Python would happen once; write clip=1.0 "
            "(the 2-norm) or no clip"
        )
    if is_multi_rank() or not context.train_step.reducer.is_local:
        raise ConfigError(
            "a step of several ranks cannot be captured: their collectives would be replayed without agreement on who takes "
            "part; capture in runs of one rank"
        )


def _require_closed(context: EngineContext) -> None:
    if any(one.is_open or one.running is not None for one in context.prepared):
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
