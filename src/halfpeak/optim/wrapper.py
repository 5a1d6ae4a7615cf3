"""OptimWrapper: accumulation, clipping and a step behind one call. Compatible with mmengine 0.10.7."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from halfpeak.casting.casts import casts_on
from halfpeak.core.errors import ClosureError, ConfigTypeError, OrderError
from halfpeak.core.optimizer_state import params_of
from halfpeak.core.step_result import StepResult
from halfpeak.distributed.replicas import synchronising
from halfpeak.engine.config import EngineConfig
from halfpeak.engine.engine import Engine
from halfpeak.engine.prepare import build
from halfpeak.engine.state_checks import check_optimizer
from halfpeak.optim.arguments import require_count
from halfpeak.optim.base import BaseOptimWrapper, check_base_settings, is_torch_optimizer
from halfpeak.optim.clipping import parse_clip_grad
from halfpeak.optim.metrics_sink import ScalarHistory, Sink, check_sink, current_logger, message_hub
from halfpeak.optim.resume_state import (
    COUNT_KEY,
    RESUME_KEY,
    check_resume_state,
    has_open_window,
    load_resume_state,
    save_resume_state,
)
from halfpeak.optim.unwrap import unwrap
from halfpeak.state.clip import Clip, NoClip
from halfpeak.state.found_inf import FoundInfReducer


class OptimWrapper(BaseOptimWrapper):
    """Wrap an optimizer for float32 training: accumulate, clip, step, zero gradients.

    ::

        update_params(loss)   scale_loss: divide by the length of the window
                              backward
                              if a step is due: step (clip, step), zero_grad

    A step whose gradients are not finite is skipped. An engine steps the optimizer; the wrapper counts backward passes.

    Every method may be overridden. User code may call ``wrapper.optimizer.step()`` itself, in an override of
    :meth:`step` or in place of it: such a step skips too, and clips if user code calls :meth:`_clip_grad` before.

    Args:
        optimizer: a torch optimizer, or any object with ``param_groups``, ``step`` and ``zero_grad``. Such an object is
            called in the same order without an engine, and this class never skips its step.
        accumulative_counts: backward passes per step.
        clip_grad: ``dict(max_norm=1.0)``, ``dict(type='value', clip_value=0.2)``, or None.
        sink: receives ``train/grad_norm``; None means mmengine's current message hub if mmengine is imported, else
            :attr:`history`.

    Attributes:
        history: the logged scalars, if there is no other sink.
        last_result: the result of the step in the last iteration; None if no step was due.
        clip_grad_kwargs: ``clip_grad`` without its ``type``, or None.
        clip_func: with ``clip_grad``, torch's function that clips so, for overrides of :meth:`_clip_grad`.

    Raises:
        ConfigError: a value out of range, or an unknown key in ``clip_grad``.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2)
        >>> wrapper.initialize_count_status(model, 0, 4)
        >>> moved = []
        >>> for _ in range(4):
        ...     with wrapper.optim_context(model):
        ...         loss = model(torch.ones(4, 2)).mean()
        ...     wrapper.update_params(loss)
        ...     moved.append(wrapper.stepped())
        >>> moved
        [False, True, False, True]
    """

    _KEYS: ClassVar[tuple[str, ...]] = (RESUME_KEY,)
    """Keys of a state dict that this class reads in addition to :class:`BaseOptimWrapper`."""

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
        *,
        sink: Sink | None = None,
    ) -> None:
        self._accumulative_counts = require_count(
            "accumulative_counts", accumulative_counts, 1, "; write accumulative_counts=1"
        )
        self._inner_count = 0
        self._max_counts = self._remainder_counts = -1
        self._clip = parse_clip_grad(clip_grad)
        self.clip_grad_kwargs: dict[str, Any] | None = None
        if clip_grad is not None:
            self.clip_grad_kwargs = {key: value for key, value in clip_grad.items() if key != "type"}
            kind = clip_grad.get("type", "norm")
            self.clip_func: Callable[..., Any] = getattr(nn.utils, f"clip_grad_{kind}_")
            self.grad_name = f"grad_{kind}"
        check_sink(sink)
        self._sink = sink
        self.history = ScalarHistory()
        self.last_result: StepResult | None = None
        self._synchronised = True
        super().__init__(optimizer)
        self._engine: Engine | None = None
        # Entries of a loaded state that wait for the engine, or for its model. Until then they are saved unchanged.
        self._pending: Mapping[str, Any] = {}

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Set the number of backward passes so far, and their number in the whole run (-1: unknown).

        May be called again, as GAN training does at the start of each phase.
        """
        done = require_count("init_counts", init_counts, 0, "; write init_counts=1")
        self._max_counts = require_count("max_counts", max_counts, -1, "; write max_counts=1")
        self._inner_count = done
        # Not read here. Overrides written for mmengine read and set this attribute.
        self._remainder_counts = self._max_counts % self._accumulative_counts
        is_open = self._engine is not None and self._engine.is_open
        if not (self._ends_window(done) or is_open or has_open_window(self._pending)):
            current_logger().warning(
                "Resumed iteration number %d is not a multiple of accumulative_counts=%d, and the gradients of the "
                "open window were not saved: its step will be too small",
                done,
                self._accumulative_counts,
            )
        if self._accumulative_counts > 1 and any(isinstance(one, _BatchNorm) for one in model.modules()):
            current_logger().warning(
                "Gradient accumulative training: batch norms see the statistics of each small batch, not of the whole window"
            )

    # A window ends after every accumulative_counts-th backward pass of the run, and at max_counts, where a new window
    # begins. The end of an epoch and a resume do not end a window.

    def should_update(self) -> bool:
        """Return whether a step is due after the last backward pass."""
        return self._ends_window(self._inner_count)

    def should_sync(self) -> bool:
        """Return whether the next backward pass must reduce its gradients over the ranks."""
        return self._ends_window(self._inner_count + 1)

    def _ends_window(self, done: int) -> bool:
        return done % self._accumulative_counts == 0 or done == self._max_counts

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss divided by the number of backward passes in its window."""
        done, total = self._inner_count, self._max_counts
        begin = done - done % self._accumulative_counts
        end = begin + self._accumulative_counts
        return loss / ((min(end, total) - begin) if done < total else (end - max(begin, total)))

    @property
    def inner_count(self) -> int:
        """The number of backward passes so far."""
        return self._inner_count

    def update_params(
        self,
        loss: Tensor,
        step_kwargs: Mapping[str, Any] | None = None,
        zero_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Run backward, then :meth:`step` and after it :meth:`zero_grad` if a step is due.

        Args:
            loss: a scalar; this method divides it with :meth:`scale_loss`.
            step_kwargs: for :meth:`step`.
            zero_kwargs: for :meth:`zero_grad`.

        Raises:
            ConfigTypeError: ``loss`` is not a tensor.
        """
        if not isinstance(loss, Tensor):
            raise ConfigTypeError(
                f"update_params needs a loss tensor, not {type(loss).__name__}; pass model(...).mean()"
            )
        self.backward(self.scale_loss(loss))
        if self.should_update():
            steps = None if self._engine is None else self._engine.num_steps
            self.step(**(step_kwargs or {}))
            if self.last_result is None and steps is not None:
                self.last_result = self._result_since(steps)
            self.zero_grad(**(zero_kwargs or {}))
        else:
            # torch's schedulers read this flag to warn of a missing optimizer step. Inside a window no step is due.
            self._opt_called = True

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward, accumulate the gradients, and count one backward pass.

        Args:
            loss: already divided by :meth:`scale_loss`.
            kwargs: passed to ``Tensor.backward``.
        """
        self._run_backward(loss, 0, kwargs)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Clip, then step or skip. Gradients stay until :meth:`zero_grad`.

        Args:
            closure: for optimizers such as LBFGS; it calls :meth:`zero_grad` and :meth:`backward` and returns the loss.
            kwargs: further arguments of the optimizer's own ``step``.

        Raises:
            OrderError: the last backward pass did not reduce its gradients over the ranks.
            ClosureError: a closure with ``accumulative_counts`` above 1.
            LossScaleCollapse: gradients stay non-finite and the scale cannot fall any more.
        """
        if closure is not None and self._accumulative_counts > 1:
            raise ClosureError(
                "step(closure) evaluates a whole step, so it needs accumulative_counts=1, not "
                f"accumulative_counts={self._accumulative_counts}"
            )
        if not self._is_watched:
            if self.clip_grad_kwargs:
                self._clip_grad()
            self._step_unwatched(kwargs if closure is None else {"closure": closure, **kwargs})
            return
        engine = self._ready()
        if closure is None and engine.has_scaled_grads:
            raise OrderError(
                "the gradients were not reduced over the ranks, because optim_context was entered for a backward pass "
                "inside a window; enter it once for each backward pass"
            )
        if self.clip_grad_kwargs and closure is None and (kwargs or self._overrides_clip):
            engine.unscale()  # An override may read .grad, where gradients wait scaled for a fused optimizer.
            self._clip_grad()
        elif self.clip_grad_kwargs and closure is not None and self._overrides_clip:
            closure = partial(self._evaluate_and_clip, engine, closure)
        if kwargs:
            steps = engine.num_steps
            self.optimizer.step(**(kwargs if closure is None else {"closure": closure, **kwargs}))
            self.last_result = self._result_since(steps)
            return
        has_gradients = engine.has_gradients
        self.last_result = result = engine.step(closure, keep_gradients=True)
        if result.grad_norm is not None and has_gradients:
            self._log_norm(result.grad_norm)

    def _clip_grad(self) -> None:
        """Unscale the gradients, clip them and log their norm, as a step does if ``clip_grad`` was given.

        An override replaces the engine's clipping. It is called before each step, and in a step with a closure after
        each evaluation whose gradients are finite.
        """
        if self._is_watched:
            grads = self._ready().main_grads()
        else:
            self._unscale_unwatched()
            params = params_of(self.optimizer)
            grads = [p.grad for p in params if p.requires_grad and p.grad is not None]
        norm = self._clip(grads) if grads else None
        if norm is not None:
            self._log_norm(norm)

    def _evaluate_and_clip(self, engine: Engine, closure: Callable[[], Any]) -> Any:
        """Call a closure, then an override of :meth:`_clip_grad` unless the step will evaluate the closure again."""
        loss = closure()
        if not bool(engine.unscale_pending()):
            self._clip_grad()
        return loss

    def _log_norm(self, norm: Tensor) -> None:
        self.message_hub.update_scalar("train/grad_norm", norm)

    @property
    def _overrides_clip(self) -> bool:
        return type(self)._clip_grad is not OptimWrapper._clip_grad

    def _backward_unwatched(self, loss: Tensor, kwargs: Mapping[str, Any]) -> None:
        loss.backward(**kwargs)

    def _unscale_unwatched(self) -> None:
        """Divide the gradients by the loss scale, where there is one."""

    def _step_unwatched(self, kwargs: Mapping[str, Any]) -> None:
        self.optimizer.step(**kwargs)

    def _result_since(self, num_steps: Tensor) -> StepResult:
        """Return the result of a direct ``optimizer.step()``; ``num_steps`` is the step count before it.  # i32[]"""
        engine = self._ready()
        return StepResult((num_steps + 1 - engine.num_steps).float(), engine.scale)

    def stepped(self) -> bool:
        """Return whether in the last iteration a step was due and not skipped. Waits for the device.

        Write ``if wrapper.stepped(): scheduler.step()`` to leave skipped steps out of a schedule or a weight average.
        """
        return self.last_result is not None and self.last_result.stepped()

    def zero_grad(self, set_to_none: bool | None = None, **kwargs: Any) -> None:
        """Drop the gradients, and with them an open accumulation window.

        Args:
            set_to_none: None means the default of ``optimizer.zero_grad``, which also gets the kwargs.
        """
        if set_to_none is not None:
            kwargs["set_to_none"] = set_to_none
        if self._engine is not None:
            zeroes = not kwargs.get("set_to_none", True)
            kept = [(p, p.grad) for p in params_of(self.optimizer) if p.grad is not None] if zeroes else []
            self._engine.abort()
            for parameter, grad in kept:
                parameter.grad = grad
        self.optimizer.zero_grad(**kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state; inside an accumulation window also the window, under ``"halfpeak"``."""
        return {**super().state_dict(), **self._extra_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore a state of this class, of another wrapper, or of a plain optimizer.

        Drops the gradients of an open window. Restores the gradients and the count of a saved window.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        self.check_state_dict(state_dict)
        if self._engine is not None:
            self._engine.abort()
        super().load_state_dict(state_dict)
        self._pending = {key: state_dict[key] for key in self._KEYS if key in state_dict}
        if self._engine is not None:
            self._apply_pending(self._engine)
        # An optimizer that is not torch's may use this key for an entry of its own.
        saved = state_dict.get(RESUME_KEY, {}) if self._is_watched else {}
        if COUNT_KEY in saved:
            self._inner_count = saved[COUNT_KEY]

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that :meth:`load_state_dict` would accept ``state_dict``.

        Raises:
            StateError: it would not.
        """
        check_base_settings(state_dict)
        if is_torch_optimizer(self.optimizer):
            check_optimizer(self.optimizer, state_dict)
        if self._is_watched:
            self._check_state(state_dict)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Generator[None]:
        """Run the forward pass of ``model`` with casts, and under ``no_sync`` inside an accumulation window."""
        if self._is_watched:
            self._prepare(model)
        can_wait = hasattr(model, "no_sync") or hasattr(model, "set_requires_gradient_sync")
        self._synchronised = self.should_sync() or not can_wait
        forward = self._ready().forward() if self._is_watched else casts_on(None)
        with synchronising(model, self._synchronised), forward, self._casting():
            yield

    @property
    def message_hub(self) -> Sink:
        """The sink of scalars."""
        # Compared with None, because a sink may be a container, which is false while it is empty.
        hub = message_hub() if self._sink is None else self._sink
        return self.history if hub is None else hub

    def __repr__(self) -> str:
        kind, every = type(self).__name__, self._accumulative_counts
        return f"Type: {kind}\n_accumulative_counts: {every}\noptimizer: \n{self.optimizer!r}\n"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engine": None, "_pending": self._extra_state()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Copy the engine first: its copy connects the copies of optimizer, masters and open window.
        engine = copy.deepcopy(self._engine, memo)
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        state = super().__getstate__()
        twin.__setstate__({name: copy.deepcopy(state[name], memo) for name in state if name != "_engine"})
        twin._set_engine(engine)
        return twin

    @property
    def _is_watched(self) -> bool:
        """Whether an engine steps the optimizer, as it does torch's optimizers. Others are called directly."""
        return is_torch_optimizer(self.optimizer)

    def _run_backward(self, loss: Tensor, loss_id: int, kwargs: Mapping[str, Any]) -> None:
        if not self._is_watched:
            self._backward_unwatched(loss, kwargs)
            self._inner_count += 1
            return
        engine = self._ready()
        self.last_result, self._pending = None, {}
        block = engine.scaled(loss, loss_id=loss_id, delay=not self._synchronised)
        with casts_on(engine.casting), block as scaled:
            scaled.backward(**kwargs)
        self._inner_count += 1

    def _config(self) -> EngineConfig:
        """The configuration of the engine."""
        return EngineConfig(clip=self._engine_clip, stepped_by="either")

    @property
    def _engine_clip(self) -> Clip:
        """The engine's way to clip: :class:`NoClip` if a subclass overrides :meth:`_clip_grad`."""
        return NoClip() if self._overrides_clip else self._clip

    def _casting(self) -> AbstractContextManager[Any]:
        """Return a context with casts for the forward pass in addition to the engine's."""
        return nullcontext()

    def _prepare(self, model: nn.Module) -> None:
        """Register the model of the coming forward pass with the engine."""
        engine = self._ready()
        engine.add_model(unwrap(model))
        self._put_buffers(engine)

    def _extra_state(self) -> dict[str, Any]:
        """Return the entries of the state dict besides the optimizer's."""
        if self._engine is None or self._pending:
            return dict(self._pending)
        found = save_resume_state(self._engine)
        return {} if found is None else {RESUME_KEY: {**found, COUNT_KEY: self._inner_count}}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if RESUME_KEY in state:
            check_resume_state(self._ready(), state[RESUME_KEY])

    def _apply_pending(self, engine: Engine) -> None:
        """Load the waiting entries of a state dict into the engine."""
        if self._pending:
            self._restore(engine, self._pending)
            if RESUME_KEY in self._pending:
                load_resume_state(engine, self._pending[RESUME_KEY])
            self._put_buffers(engine)

    def _put_buffers(self, engine: Engine) -> None:
        """Load the batch-norm statistics of an open window once the engine knows the model; drop the waiting entries."""
        if engine.models:
            if has_open_window(self._pending):
                engine.load_window_buffers(self._pending[RESUME_KEY]["buffers"])
            self._pending = {}

    def _restore(self, engine: Engine, state: Mapping[str, Any]) -> None:
        """Load entries in the formats of other libraries. For subclasses; this class has none."""

    def _reducer(self) -> FoundInfReducer:
        return FoundInfReducer()

    def _build(self) -> Engine:
        return build(self._config(), [], [self.optimizer], reducer=self._reducer())

    def _set_engine(self, engine: Engine | None) -> None:
        self._engine = engine
        if engine is not None and engine.policy.param is None:
            # A deleted wrapper frees its optimizer for another wrapper, unless a converted model still needs masters.
            weakref.finalize(self, engine.remove).atexit = False

    def _ready(self) -> Engine:
        """Return the engine of the current optimizer, building it if needed."""
        before = self._engine
        if before is not None and before.optimizers[0] is self.optimizer:
            return before
        if before is not None:
            before.remove()
            self._engine = None
        engine = self._build()
        self._set_engine(engine)
        if before is not None:
            for scaler, known in zip(engine.scalers, before.scalers, strict=True):
                scaler.state = known.state
        self._apply_pending(engine)
        return engine
