"""Whole: a training step that is compiled as one graph, the engine's part in it being two operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from halfpeak.core.errors import ConfigError, OrderError
from halfpeak.core.outcome import StepResult
from halfpeak.engine.operators import enlist, operators
from halfpeak.fused.optimizer import FusedOptimizer
from halfpeak.parts.clip import ClipNorm
from halfpeak.parts.keeper import keeper_of
from halfpeak.parts.loss_scaler import scale_loss
from halfpeak.parts.verdict import is_multi_rank

if TYPE_CHECKING:
    from halfpeak.engine.engine import Engine

P = ParamSpec("P")
R = TypeVar("R")


class Whole:
    """What a graph and its engine know of each other.

    ::

        __call__    follow who has written to weights since the last call
        graph       forward, loss, scale, gradients
                    operator: unscale, verdict, clip, step or skip, move the scale, as ever
        __call__    weights are now what the engine takes them for

    The graph may hold copies of weights and buffers when it calls the operator, and write them back at its end. So the
    operator leaves what it has done in these copies too.

    Attributes:
        num_losses: how many loss scales there are.
        ticket: what the operators write, to be kept in order.      # f32[]
        optimizers: as the engine's.
        weights: per optimizer, what gets gradients.
        written: these, each once.
        buffers: the running statistics that a skipped step puts back.
        scales: the loss scales, as the graph knows them.           # f32[] each
        ends: whether the next steps end an accumulation window, a window's length of them.
        position: how many steps the graph has taken.
        pending: a backward pass that is not taken in yet: loss and lanes, numbers of weights, gradients.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_losses = len(engine.scalers)
        self.every = engine.plan.accumulation.every
        self.tells_norm = isinstance(engine.plan.clip, ClipNorm)
        self.ticket = torch.zeros((), device=engine.device)
        self.optimizers: list[Optimizer] = []
        self.weights: list[list[Tensor]] = []
        self.written: list[Tensor] = []
        self.buffers: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.ends: list[bool] = []
        self.position = 0
        self.pending: tuple[list[int], list[int], list[Tensor]] | None = None
        self.number = enlist(self)
        self._versions: list[int] = []
        self.operators = operators()

    # What follows is traced.

    def backward(
        self, loss: Tensor, loss_id: int, optimizers: Iterable[Optimizer] | Optimizer | None, kwargs: Any
    ) -> None:
        """:meth:`halfpeak.Engine.backward`."""
        self.flush()
        lanes = self._lanes_of(optimizers)
        if self.every != 1:
            loss = loss / self.every
        weights = [weight for lane in lanes for weight in self.weights[lane]]
        found = torch.autograd.grad(
            scale_loss(loss, self.scales[loss_id]), weights, allow_unused=True, **kwargs
        )
        grads: list[Tensor | None] = list(found)
        which = [index for index, grad in enumerate(grads) if grad is not None]
        self.pending = ([loss_id, *lanes], which, [grad for grad in grads if grad is not None])

    def step(
        self,
        optimizers: Iterable[Optimizer] | Optimizer | None,
        *,
        closure: Callable[[], Any] | None,
        keep_gradients: bool,
    ) -> StepResult:
        """:meth:`halfpeak.Engine.step`.

        Raises:
            ConfigError: a closure, or gradients that are to stay.
        """
        if closure is not None or keep_gradients:
            raise ConfigError(
                "a compiled step has no closure and keeps no gradients; leave them out, or write torch.compile(function)"
            )
        backward, which, grads = self.pending or ([], [], [])
        self.pending = None
        lanes = self._lanes_of(optimizers)
        with torch.no_grad():
            found_inf, scales, norm = self.operators.step(
                self.number, self.ticket, backward, which, grads, lanes, self.written, self.buffers
            )
        self.scales = list(scales.unbind())
        boundary = self.ends[self.position % self.every]
        self.position += 1
        return StepResult(found_inf, self.scales[0], norm if self.tells_norm and boundary else None, boundary)

    def flush(self) -> None:
        """Take in a backward pass that no step follows."""
        if self.pending is not None:
            self.operators.backward(self.number, self.ticket, *self.pending)
            self.pending = None

    def begin(self) -> None:
        """The graph begins."""
        self.operators.watch(self.number, self.written, True)

    def end(self) -> None:
        """The graph ends."""
        self.flush()
        self.operators.watch(self.number, self.written, False)
        self.scales = []
        self.position = 0

    def _lanes_of(self, optimizers: Iterable[Optimizer] | Optimizer | None) -> list[int]:
        if optimizers is None:
            return list(range(len(self.optimizers)))
        numbers: list[int] = []
        for wanted in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
            found = [i for i, known in enumerate(self.optimizers) if known is wanted]
            if not found:
                raise OrderError("an optimizer was not prepared by this engine; pass it to halfpeak.prepare")
            numbers += [number for number in found if number not in numbers]
        return numbers

    # What follows is run by Python.

    def look(self) -> None:
        """Before the graph: what it will read of the engine, and who has written to weights."""
        engine = self._engine
        engine.catch_up()
        engine.masters.refresh()
        self.optimizers = engine.optimizers
        for optimizer in self.optimizers:
            keeper = keeper_of(optimizer)
            engine.masters.adopt(optimizer)
            if keeper is not None and isinstance(optimizer, FusedOptimizer) and optimizer.keeper is not None:
                optimizer.keeper.refresh()
        self.weights = [list(lane.roster().slots.sources) for lane in engine.lanes]
        self.written = list({id(weight): weight for lane in self.weights for weight in lane}.values())
        self.buffers = engine.buffers.live()
        self.scales = [scaler.state.scale for scaler in engine.scalers]
        self.ends = [
            engine.plan.accumulation.is_boundary(engine.index + later) for later in range(self.every)
        ]
        self.position = 0
        self.pending = None

    def agree(self) -> None:
        """Weights are what the engine takes them for, whatever their versions say: the graph counts those up as it likes."""
        for optimizer in self._engine.optimizers:
            self._engine.masters.note_published(optimizer)
            if isinstance(optimizer, FusedOptimizer) and optimizer.keeper is not None:
                optimizer.keeper.note()

    @torch.no_grad()
    def run_backward(
        self, backward: Sequence[int], which: Sequence[int], grads: Sequence[Tensor], *, own: bool
    ) -> None:
        """Take gradients in.

        Args:
            backward: the number of the loss, and those of the lanes.
            which: of the lanes' weights have a gradient.
            grads: those gradients.
            own: whether their memory is free to be used until the step. The graph's is, until this returns.
        """
        self.agree()
        engine = self._engine
        engine.buffers.note_begun()
        loss_id, *numbers = backward
        lanes = [engine.lanes[number] for number in numbers]
        weights = [weight for number in numbers for weight in self.weights[number]]
        delay = engine.delays_unscaling()
        taken, given = set[int](), set[int]()
        with engine.scaled(torch.zeros_like(self.ticket), lanes=lanes, loss_id=loss_id, delay=delay):
            for index, grad in zip(which, grads, strict=True):
                weight = weights[index]
                if id(weight) in given:
                    continue  # Its gradient is there once for each of its optimizers.
                given.add(id(weight))
                if weight.grad is not None:
                    weight.grad.add_(grad)
                    continue
                is_free = (
                    own and not delay and grad.data_ptr() not in taken and grad.stride() == weight.stride()
                )
                taken.add(grad.data_ptr())
                weight.grad = (
                    grad.detach() if is_free else torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
                )

    @torch.no_grad()
    def run_step(
        self,
        backward: Sequence[int],
        which: Sequence[int],
        grads: Sequence[Tensor],
        lanes: Sequence[int],
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take gradients in and step.

        Returns:
            ``found_inf``, the loss scales and the norm.  # f32[], f32[losses], f32[]
        """
        engine = self._engine
        own = [*self.written, *self.buffers]
        copies = [
            (mine, given)
            for mine, given in zip(own, (*weights, *buffers), strict=True)
            if not _is_one(mine, given)
        ]
        before = [mine.clone() for mine, _ in copies]
        for mine, given in copies:
            mine.copy_(given)
        if backward:
            # Memory that the graph uses again must not hold what a later step is to read.
            ends = engine.plan.accumulation.is_boundary(engine.index) and set(backward[1:]) <= set(lanes)
            self.run_backward(backward, which, grads, own=ends)
        else:
            self.agree()
        result = engine.step(optimizers=[engine.optimizers[number] for number in lanes])
        for (mine, given), value in zip(copies, before, strict=True):
            given.copy_(mine)
            mine.copy_(value)
        norm = self.ticket.new_zeros(()) if result.grad_norm is None else result.grad_norm.clone()
        return result.found_inf.clone(), torch.stack([s.state.scale for s in engine.scalers]), norm

    def watch(self, versions: list[int], *, first: bool) -> None:
        """While the graph is traced: refuse one that writes to weights itself, which nobody would notice.

        Raises:
            OrderError: it does.
        """
        if first:
            self._versions = versions
        elif versions != self._versions:
            raise OrderError(
                "the compiled function writes to weights beside engine.step(); do that after it has returned"
            )


class Compiled(Generic[P, R]):
    """A function that trains, compiled. Made by :meth:`halfpeak.Engine.compile`."""

    def __init__(self, engine: Engine, function: Callable[P, R], options: dict[str, Any]) -> None:
        _require_compilable(engine)
        self._engine = engine
        self._whole = whole = Whole(engine)

        def traced(*args: P.args, **kwargs: P.kwargs) -> R:
            whole.begin()
            out = function(*args, **kwargs)
            whole.end()
            # A loss that is returned has had its backward pass.
            return tree_map_only(Tensor, Tensor.detach, out)

        asked: dict[str, Any] = {"fullgraph": True, **options}
        self._compiled = torch.compile(_of_its_own(traced, function, whole.number), **asked)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it."""
        engine, whole = self._engine, self._whole
        whole.look()
        engine.whole = whole
        try:
            with torch._dynamo.config.patch(trace_autograd_ops=True):
                return self._compiled(*args, **kwargs)
        finally:
            engine.whole = None
            whole.agree()


def _of_its_own(traced: Callable[P, R], function: Callable[P, R], number: int) -> Callable[P, R]:
    """``traced`` with code of its own: the compiler counts graphs, and remembers which shapes vary, by code and its place."""
    assert isinstance(traced, FunctionType)
    place = getattr(function, "__code__", traced.__code__)
    code = traced.__code__.replace(
        co_name=f"{place.co_name}_{number}",
        co_filename=place.co_filename,
        co_firstlineno=place.co_firstlineno,
    )
    return FunctionType(code, traced.__globals__, closure=traced.__closure__)


def _is_one(mine: Tensor, given: Tensor) -> bool:
    return mine.data_ptr() == given.data_ptr()


def _require_compilable(engine: Engine) -> None:
    plan = engine.plan
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
    if plan.accumulation.total is not None or plan.release_gradients:
        raise ConfigError(
            "a compiled step divides every loss by the same number and releases no gradients; leave out "
            "Accumulation(total=...) and release_gradients"
        )
