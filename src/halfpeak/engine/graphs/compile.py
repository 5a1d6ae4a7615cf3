"""A training step compiled as one graph. The engine's work is in custom operators that the compiler does not trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, Final, Generic, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from halfpeak.core.errors import ConfigError, OrderError
from halfpeak.core.step_result import StepResult
from halfpeak.engine.context import EngineContext, StepEngine
from halfpeak.fused.base import FusedOptimizer
from halfpeak.state.clip import ClipNorm
from halfpeak.state.found_inf import is_multi_rank
from halfpeak.state.loss_scaler import scale_loss
from halfpeak.state.remainder_store import remainder_store_of

P = ParamSpec("P")
R = TypeVar("R")


class CompiledStep:
    """The state that a compiled graph and its engine share.

    ::

        __call__    refresh(): follow writes to weights since the last call
        graph       forward, loss, scale, gradients
                    operator: unscale, clip, found_inf, step or skip, update the scale, as in an ordinary step
        __call__    sync_versions(): the graph's writes to weights count as the engine's own

    When the graph calls the operator, it may hold copies of weights and buffers, which it writes back at its end. So
    the operator writes its results to these copies, too.

    Attributes:
        num_losses: the number of loss scales.
        token: written by the operators ``backward`` and ``step``, which keeps them in order.  # f32[]
        weights: per optimizer, the parameters that get gradients.
        written: the parameters of ``weights``, each once.
        buffers: the running statistics that a skipped step restores.
        scales: the loss scales at this point of the graph.  # f32[] each
        ends: for each of the next ``every`` steps, whether it ends an accumulation window.
        position: the number of steps in the graph so far.
        pending: a backward pass that is not accumulated yet: indices of loss and optimizers, loss, indices of weights
            with a gradient, gradients.
    """

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self.num_losses = len(engine.context.scalers)
        self.every = engine.context.config.accumulation.every
        self.tells_norm = isinstance(engine.context.config.clip, ClipNorm)
        self.token = torch.zeros((), dtype=torch.float32, device=engine.context.device)
        self.optimizers: list[Optimizer] = []
        self.weights: list[list[Tensor]] = []
        self.written: list[Tensor] = []
        self.buffers: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.ends: list[bool] = []
        self.position = 0
        self.pending: tuple[list[int], Tensor, list[int], list[Tensor]] | None = None
        # The operators get this number as argument and find the object by it, as long as it lives.
        self.number = max(_STEPS, default=0) + 1
        _STEPS[self.number] = self
        self._versions: list[int] = []
        _library()
        self.operators: Any = torch.ops.halfpeak

    # The compiler traces the following methods.

    def backward(
        self, loss: Tensor, loss_id: int, optimizers: Iterable[Optimizer] | Optimizer | None, kwargs: Any
    ) -> None:
        """:meth:`halfpeak.Engine.backward`."""
        self.flush()
        numbers = self._numbers_of(optimizers)
        if self.every != 1:
            loss = loss / self.every
        weights = [weight for number in numbers for weight in self.weights[number]]
        found = torch.autograd.grad(
            scale_loss(loss, self.scales[loss_id]), weights, allow_unused=True, **kwargs
        )
        grads: list[Tensor | None] = list(found)
        which = [index for index, grad in enumerate(grads) if grad is not None]
        given = [grad for grad in grads if grad is not None]
        self.pending = ([loss_id, *numbers], loss.detach(), which, given)

    def step(
        self,
        optimizers: Iterable[Optimizer] | Optimizer | None,
        *,
        closure: Callable[[], Any] | None,
        keep_gradients: bool,
    ) -> StepResult:
        """:meth:`halfpeak.Engine.step`.

        Raises:
            ConfigError: a closure, or ``keep_gradients``.
        """
        if closure is not None or keep_gradients:
            raise ConfigError(
                "a compiled step has no closure and keeps no gradients; leave them out, or write torch.compile(function)"
            )
        backward, loss, which, grads = self.pending or ([], torch.zeros_like(self.token), [], [])
        self.pending = None
        numbers = self._numbers_of(optimizers)
        with torch.no_grad():
            found_inf, scales, norm = self.operators.step(
                self.number, self.token, backward, loss, which, grads, numbers, self.written, self.buffers
            )
        self.scales = list(scales.unbind())
        boundary = self.ends[self.position % self.every]
        self.position += 1
        return StepResult(found_inf, self.scales[0], norm if self.tells_norm and boundary else None, boundary)

    def flush(self) -> None:
        """Accumulate the gradients of a backward pass that is not directly followed by a step."""
        if self.pending is not None:
            self.operators.backward(self.number, self.token, *self.pending)
            self.pending = None

    def begin(self) -> None:
        """Mark the beginning of the graph."""
        self.operators.watch(self.number, self.written, True)

    def end(self) -> None:
        """Mark the end of the graph."""
        self.flush()
        self.operators.watch(self.number, self.written, False)
        self.scales = []
        self.position = 0

    def _numbers_of(self, optimizers: Iterable[Optimizer] | Optimizer | None) -> list[int]:
        if optimizers is None:
            return list(range(len(self.optimizers)))
        numbers: list[int] = []
        for wanted in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
            found = [i for i, known in enumerate(self.optimizers) if known is wanted]
            if not found:
                raise OrderError("an optimizer was not prepared by this engine; pass it to halfpeak.prepare")
            numbers += [number for number in found if number not in numbers]
        return numbers

    # Python runs the following methods; the compiler does not trace them.

    def refresh(self) -> None:
        """Before the graph runs: follow writes to weights, and collect the tensors and numbers that the graph reads."""
        context = self._engine.context
        context.before_forward()
        context.masters.refresh()
        self.optimizers = context.optimizers
        for optimizer in self.optimizers:
            has_remainders = remainder_store_of(optimizer) is not None
            context.masters.adopt(optimizer)
            if has_remainders and isinstance(optimizer, FusedOptimizer) and optimizer.remainders is not None:
                optimizer.remainders.refresh()
        self.weights = [
            [w for w in one.table().pairs.model_params if w.requires_grad] for one in context.prepared
        ]
        self.written = list({id(weight): weight for weights in self.weights for weight in weights}.values())
        self.buffers = context.stats.live()
        self.scales = [scaler.state.scale for scaler in context.scalers]
        accumulation, micro_step = context.config.accumulation, context.record.micro_step
        self.ends = [accumulation.is_boundary(micro_step + later) for later in range(self.every)]
        self.position = 0
        self.pending = None

    def sync_versions(self) -> None:
        """Record the graph's writes to weights as the engine's own: a graph raises version counters arbitrarily."""
        context = self._engine.context
        for one, optimizer in zip(context.prepared, context.optimizers, strict=True):
            context.masters.record_published(one.cached_table().master_indices)
            if isinstance(optimizer, FusedOptimizer) and optimizer.remainders is not None:
                optimizer.remainders.note()

    @torch.no_grad()
    def run_backward(
        self,
        backward: Sequence[int],
        loss: Tensor,
        which: Sequence[int],
        grads: Sequence[Tensor],
        *,
        own: bool,
    ) -> None:
        """Unscale and accumulate gradients.

        Args:
            backward: the index of the loss, then the indices of the optimizers.
            loss: the loss, to check whether it is finite.
            which: the indices of the optimizers' weights that have a gradient.
            grads: the gradients of these weights.
            own: whether the memory of ``grads`` may be used until the step. The graph reuses it after the operator.
        """
        self.sync_versions()
        engine, context = self._engine, self._engine.context
        context.stats.mark_forward_begun()
        loss_id, *numbers = backward
        prepared = [context.prepared[number] for number in numbers]
        optimizers = [one.optimizer for one in prepared]
        weights = [weight for number in numbers for weight in self.weights[number]]
        delay = context.delays_unscaling
        used, given = set[int](), set[int]()
        with engine.scaled(loss, optimizers=optimizers, loss_id=loss_id, delay=delay):
            for index, grad in zip(which, grads, strict=True):
                weight = weights[index]
                if id(weight) in given:
                    continue  # A weight of several optimizers has its gradient once for each.
                given.add(id(weight))
                # The graph lacks these hooks, because tracing replaces weights by other tensors.
                for hook in (weight._backward_hooks or {}).values():
                    changed = hook(grad)
                    grad = grad if changed is None else changed
                if weight.grad is not None:
                    weight.grad.add_(grad)
                else:
                    is_free = (
                        own and not delay and grad.data_ptr() not in used and grad.stride() == weight.stride()
                    )
                    used.add(grad.data_ptr())
                    weight.grad = (
                        grad.detach() if is_free else torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
                    )
                for hook in (weight._post_accumulate_grad_hooks or {}).values():
                    hook(weight)

    @torch.no_grad()
    def run_step(
        self,
        backward: Sequence[int],
        loss: Tensor,
        which: Sequence[int],
        grads: Sequence[Tensor],
        numbers: Sequence[int],
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Unscale and accumulate gradients, and step.

        Returns:
            ``found_inf``, the loss scales and the norm.  # f32[], f32[losses], f32[]
        """
        engine, context = self._engine, self._engine.context
        own = [*self.written, *self.buffers]
        copies = [
            (mine, given)
            for mine, given in zip(own, (*weights, *buffers), strict=True)
            if mine.data_ptr() != given.data_ptr()
        ]
        before = [mine.clone() for mine, _ in copies]
        for mine, given in copies:
            mine.copy_(given)
        if backward:
            # The graph reuses the memory of gradients, so it must not hold gradients that a later step reads.
            ends = context.config.accumulation.is_boundary(context.record.micro_step) and set(
                backward[1:]
            ) <= set(numbers)
            self.run_backward(backward, loss, which, grads, own=ends)
        else:
            self.sync_versions()
        result = engine.step(optimizers=[context.optimizers[number] for number in numbers])
        for (mine, given), value in zip(copies, before, strict=True):
            given.copy_(mine)
            mine.copy_(value)
        norm = self.token.new_zeros(()) if result.grad_norm is None else result.grad_norm.clone()
        return result.found_inf.clone(), torch.stack([s.state.scale for s in context.scalers]), norm

    def watch(self, versions: list[int], *, first: bool) -> None:
        """During tracing: refuse writes of the function itself to weights: :meth:`sync_versions` would hide them.

        Versions may also fall: for weights in one piece of memory, the compiler continues with views that count anew.

        Raises:
            OrderError: a version has risen between the first and the second call.
        """
        if first:
            self._versions = versions
        elif any(now > then for now, then in zip(versions, self._versions, strict=True)):
            raise OrderError(
                "the compiled function writes to weights beside engine.step(); do that after it has returned"
            )


class CompiledFunction(Generic[P, R]):
    """A function that trains, compiled. Made by :meth:`halfpeak.Engine.compile`."""

    def __init__(self, engine: StepEngine, function: Callable[P, R], options: dict[str, Any]) -> None:
        _require_compilable(engine.context)
        self._engine = engine
        self._step = step = CompiledStep(engine)

        def traced(*args: P.args, **kwargs: P.kwargs) -> R:
            step.begin()
            out = function(*args, **kwargs)
            step.end()
            # A returned loss needs no graph, because its backward pass has run.
            return tree_map_only(Tensor, Tensor.detach, out)

        asked: dict[str, Any] = {"fullgraph": True, **options}
        self._compiled = torch.compile(_of_its_own(traced, function, step.number), **asked)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the compiled function."""
        engine, step = self._engine, self._step
        step.refresh()
        engine.compiled_step = step
        has_grad = torch.is_grad_enabled()
        try:
            # Guard on module hooks: a hook that is added later is in the next graph, or the compiler refuses it.
            with torch._dynamo.config.patch(trace_autograd_ops=True, skip_nnmodule_hook_guards=False):
                return self._compiled(*args, **kwargs)
        finally:
            # Backends that run the graph line by line leave the step's no_grad on if the step raises.
            torch.set_grad_enabled(has_grad)
            engine.compiled_step = None
            step.sync_versions()


def _of_its_own(traced: Callable[P, R], function: Callable[P, R], number: int) -> Callable[P, R]:
    """``traced`` with a code object of its own, by which the compiler counts graphs and remembers varying shapes."""
    assert isinstance(traced, FunctionType)
    place = getattr(function, "__code__", traced.__code__)
    code = traced.__code__.replace(
        co_name=f"{place.co_name}_{number}",
        co_filename=place.co_filename,
        co_firstlineno=place.co_firstlineno,
    )
    return FunctionType(code, traced.__globals__, closure=traced.__closure__)


def _require_compilable(context: EngineContext) -> None:
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        raise ConfigError(
            f"the compiler of torch {torch.__version__} cannot trace a backward pass; write torch.compile(function), which "
            "compiles what lies before engine.backward"
        )
    if is_multi_rank():
        raise ConfigError(
            "gradients of several ranks are reduced by hooks that a compiled backward pass does not run; write "
            "torch.compile(function), which leaves engine.backward to Python"
        )
    if context.config.accumulation.total is not None:
        raise ConfigError(
            "a compiled step divides every loss by the same number; leave out Accumulation(total=...)"
        )


_STEPS: Final[WeakValueDictionary[int, CompiledStep]] = WeakValueDictionary()

_ENGINE = "int engine, Tensor(a!) token, int[] backward, Tensor loss, int[] which, Tensor(b!)[] grads"

_SCHEMAS: Final = (
    f"backward({_ENGINE}) -> ()",
    f"step({_ENGINE}, int[] optimizers, Tensor(c!)[] weights, Tensor(d!)[] buffers) -> (Tensor, Tensor, Tensor)",
    "watch(int engine, Tensor[] weights, bool first) -> ()",
)


@functools.cache
def _library() -> torch.library.Library:
    """Define the operators, ``torch.ops.halfpeak``. The cache keeps the library, because without it they are gone.

    ::

        backward    accumulate the gradients of a backward pass
        step        the same for a backward pass directly before the step, if there is one; then step
        watch       only during tracing: detect that the function itself writes to weights

    ``backward`` and ``step`` write to ``token``, so the compiler keeps their order and does not remove them. ``step``
    is declared to write to weights and buffers, so the compiler moves no other read of these across it.
    """
    library = torch.library.Library("halfpeak", "FRAGMENT")
    # A CUDA graph must not contain the operators, because a replay would not call Python.
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    tags = () if unsafe is None else (unsafe,)
    for schema in _SCHEMAS:
        library.define(schema, tags=tags)
    for name, run in (("backward", _backward), ("step", _step), ("watch", _nothing)):
        library.impl(name, run, "CompositeExplicitAutograd")
    for name, fake in (("backward", _nothing), ("step", _fake_step), ("watch", _fake_watch)):
        torch.library.register_fake(f"halfpeak::{name}", fake, lib=library)
    return library


def _backward(engine: int, token: Tensor, *backward: Any) -> None:
    token.add_(1)
    _STEPS[engine].run_backward(*backward, own=False)


def _step(engine: int, token: Tensor, *step: Any) -> tuple[Tensor, Tensor, Tensor]:
    token.add_(1)
    return _STEPS[engine].run_step(*step)


def _fake_step(engine: int, token: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    number = token.new_empty(())
    return number, token.new_empty(_STEPS[engine].num_losses), token.new_empty(())


def _fake_watch(engine: int, weights: list[Tensor], first: bool) -> None:  # arguments of the schema
    _STEPS[engine].watch([weight._version for weight in weights], first=first)


def _nothing(*_: object) -> None:
    """Do nothing: ``watch`` when the graph runs, ``backward`` when it is traced."""
