"""OptimWrapper: accumulation, clipping and a step behind one call. Answers to mmengine 0.10.7."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from halfpeak.core.errors import ConfigTypeError
from halfpeak.core.levels import Properties
from halfpeak.core.outcome import StepResult
from halfpeak.core.policy import Policy
from halfpeak.core.schedule import ScaleConfig
from halfpeak.engine.engine import Engine
from halfpeak.engine.plan import Plan
from halfpeak.engine.prepare import build
from halfpeak.engine.state import put_window, take_window
from halfpeak.engine.sync import synchronising
from halfpeak.optim.base import BaseOptimWrapper
from halfpeak.optim.clipping import parse_clip_grad
from halfpeak.optim.counts import Counts
from halfpeak.optim.sink import ScalarHistory, Sink, message_hub

_logger = logging.getLogger("halfpeak.optim")


class OptimWrapper(BaseOptimWrapper):
    """A float32 step: accumulate, clip, step, zero.

    ::

        update_params(loss)   scale_loss: divide by the length of the window
                              backward
                              if a step is due: step (clip, step), zero_grad

    A step whose gradients are not finite is skipped. Everything goes through the engine; the wrapper counts.

    Args:
        optimizer: the optimizer.
        accumulative_counts: backward passes per step.
        clip_grad: ``dict(max_norm=1.0)``, ``dict(type='value', clip_value=0.2)``, or None.
        sink: where ``train/grad_norm`` goes; None means mmengine's current message hub where mmengine is in use, else
            :attr:`history`.

    Attributes:
        history: the scalars that went to no other sink.
        last_result: what the last :meth:`step` did, or None.

    Raises:
        ConfigError: a value out of range, or an unknown key in ``clip_grad``.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2)
        >>> for _ in range(2):
        ...     with wrapper.optim_context(model):
        ...         loss = model(torch.ones(4, 2)).mean()
        ...     wrapper.update_params(loss)
        >>> wrapper.last_result.stepped()
        True
    """

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
        *,
        sink: Sink | None = None,
    ) -> None:
        self._counts = Counts(accumulative_counts)
        self._clip = parse_clip_grad(clip_grad)
        self._engine: Engine | None = None
        self._synchronised = True
        self._pending_state: Mapping[str, Any] | None = None
        self._sink = sink
        self.history = ScalarHistory()
        self.last_result: StepResult | None = None
        super().__init__(optimizer)

    def update_params(
        self,
        loss: Tensor,
        step_kwargs: Mapping[str, Any] | None = None,
        zero_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Backward, and a step and ``zero_grad`` where one is due. Gradients are never zeroed before a backward pass.

        Args:
            loss: a scalar; divided by the length of its window here.
            step_kwargs: for :meth:`step`.
            zero_kwargs: for :meth:`zero_grad`.
        """
        if not isinstance(loss, Tensor):
            raise ConfigTypeError(
                f"update_params needs a loss tensor, not {type(loss).__name__}; pass model(...).mean()"
            )
        self.backward(self.scale_loss(loss))
        if self.should_update():
            self.step(**(step_kwargs or {}))
            self.zero_grad(**(zero_kwargs or {}))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward and take the gradients in. Counts one.

        Args:
            loss: already divided (:meth:`scale_loss`).
            kwargs: passed to ``Tensor.backward``.
        """
        self._run_backward(loss, 0, kwargs)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Clip, then step or skip. Gradients stay until :meth:`zero_grad`.

        Args:
            closure: for optimizers such as LBFGS; it calls :meth:`zero_grad` and :meth:`backward` and returns the loss.
        """
        result = self._ready().step(closure, keep_gradients=True)
        self.last_result = result
        if result.grad_norm is not None:
            self._log("train/grad_norm", result.grad_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and with them the window if one is open."""
        if self._engine is not None:
            self._engine.abort()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Generator[None]:
        """The forward pass of ``model``: casts on; no gradient reduction (``no_sync``) inside an accumulation window."""
        self._prepare(model)
        with ExitStack() as stack:
            stack.enter_context(self._casting())
            can_wait = hasattr(model, "no_sync") or hasattr(model, "set_requires_gradient_sync")
            self._synchronised = self.should_sync() or not can_wait
            if can_wait:
                stack.enter_context(synchronising(model, self._synchronised))
            yield

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Say how many backward passes there were and how many there will be (-1: unknown).

        May be called again, as GAN training does at the start of each phase.
        """
        self._counts.start(init_counts, max_counts)
        every = self._counts.every
        has_window = self._pending_state is not None or (
            self._engine is not None and self._engine.has_open_window
        )
        if init_counts % every != 0 and not has_window:
            _logger.warning(
                "Resumed iteration number %d is not a multiple of accumulative_counts=%d, and the gradients of the "
                "open window were not saved: its step will be too small",
                init_counts,
                every,
            )
        if every > 1 and any(isinstance(module, _BatchNorm) for module in model.modules()):
            _logger.warning(
                "Gradient accumulative training sees batch statistics of each small batch, not of the sum"
            )

    def should_update(self) -> bool:
        """After a backward pass: whether a step is due."""
        return self._counts.is_update()

    def should_sync(self) -> bool:
        """Before a backward pass: whether its gradients must be reduced over the ranks."""
        return self._counts.is_sync()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss divided by the length of its window."""
        return loss / self._counts.divisor()

    @property
    def inner_count(self) -> int:
        """Backward passes so far."""
        return self._counts.done

    @property
    def _inner_count(self) -> int:
        return self._counts.done

    @_inner_count.setter
    def _inner_count(self, value: int) -> None:
        self._counts.done = value

    @property
    def _accumulative_counts(self) -> int:
        return self._counts.every

    @property
    def _max_counts(self) -> int:
        return self._counts.total

    @property
    def _remainder_counts(self) -> int:
        return self._counts.remainder

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state; inside an accumulation window also the window, under ``"halfpeak"``."""
        state = super().state_dict()
        if self._engine is not None and self._engine.has_open_window:
            state["halfpeak"] = take_window(self._engine)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore what :meth:`state_dict` gave, or the state of another wrapper or of a plain optimizer."""
        super().load_state_dict(state_dict)
        self._pending_state = dict(state_dict)
        if self._engine is not None:
            self._apply_pending(self._engine)

    def __repr__(self) -> str:
        return f"Type: {type(self).__name__}\n_accumulative_counts: {self._counts.every}\noptimizer: {self.optimizer!r}\n"

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimWrapper:
        # The engine first: it knows how to copy its optimizer together with the masters in it.
        engine = copy.deepcopy(self._engine, memo)
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            twin.__dict__[name] = engine if name == "_engine" else copy.deepcopy(value, memo)
        return twin

    def _run_backward(self, loss: Tensor, loss_id: int, kwargs: Mapping[str, Any]) -> None:
        engine = self._ready()
        block = engine.scaled(loss, lanes=engine.lanes, loss_id=loss_id, delay=not self._synchronised)
        # Recomputation in the backward pass (activation checkpointing) must be cast as the forward pass was.
        with self._casting(), block as scaled:
            scaled.backward(**kwargs)
        self._counts.done += 1

    def _plan(self) -> Plan:
        """What this wrapper asks of the engine."""
        return Plan(properties=Properties(), policy=Policy(), scale=ScaleConfig.static(), clip=self._clip)

    def _casting(self) -> AbstractContextManager[Any]:
        """The casts of forward and backward."""
        return nullcontext()

    def _prepare(self, model: nn.Module) -> None:
        """Look at the model of the coming forward pass."""
        self._ready().watch(getattr(model, "module", model))

    def _build(self) -> Engine:
        return build(self._plan(), [], [self.optimizer])

    def _ready(self) -> Engine:
        """The engine of the optimizer as it is now."""
        if self._engine is not None and self._engine.lanes[0].optimizer is not self.optimizer:
            self._engine.remove()
            self._engine = None
        if self._engine is None:
            self._engine = self._build()
            self._apply_pending(self._engine)
        return self._engine

    def _apply_pending(self, engine: Engine) -> None:
        """Give the engine what a state dict held for it."""
        pending, self._pending_state = self._pending_state, None
        if pending is not None:
            self._restore(engine, pending)

    def _restore(self, engine: Engine, state: Mapping[str, Any]) -> None:
        if "halfpeak" in state:
            put_window(engine, state["halfpeak"])

    def _log(self, key: str, value: Tensor) -> None:
        (self._sink or message_hub() or self.history).update_scalar(key, value)
