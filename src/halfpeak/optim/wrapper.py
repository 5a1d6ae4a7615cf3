"""OptimWrapper: accumulation, clipping and a step behind one call. Compatible with mmengine 0.10.7."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from halfpeak.casting.casts import casts_on, disable_casts
from halfpeak.core.accumulation import Accumulation
from halfpeak.core.errors import ClosureError, ConfigTypeError, OrderError
from halfpeak.core.keywords import known_keywords
from halfpeak.core.optimizer_state import params_of
from halfpeak.core.step_result import StepResult
from halfpeak.ops import foreach
from halfpeak.ops.async_scalar import AsyncScalar
from halfpeak.optim.arguments import require_count, require_flag
from halfpeak.optim.base import BaseOptimWrapper
from halfpeak.optim.clipping import parse_clip_grad
from halfpeak.optim.metrics_sink import ScalarHistory, Sink, check_sink, current_logger, message_hub
from halfpeak.optim.unwrap import unwrap
from halfpeak.optim.window import WINDOW_KEY, check_window, load_gradients, save_window
from halfpeak.parts.batch_norm import BatchNormStats
from halfpeak.parts.clip import ClipNorm
from halfpeak.parts.model_hooks import hook_loads
from halfpeak.parts.nonfinite import PATIENCE, WITHOUT_A_SCALE, collapse, nonfinite_names
from halfpeak.parts.replicas import needs_first_reduction, synchronising
from halfpeak.parts.step_hooks import passing_found_inf, takes_found_inf


class OptimWrapper(BaseOptimWrapper):
    """Wraps an optimizer for float32 training: accumulate, clip, step, zero gradients.

    Methods call each other as in mmengine, so each may be overridden. As there, nothing looks at the gradients, and a NaN is
    stepped; with ``skip_nonfinite=True`` a step whose gradients are not finite is skipped.

    Args:
        optimizer: a torch optimizer, or any object with ``param_groups``, ``step`` and ``zero_grad``.
        accumulative_counts: backward passes per step.
        clip_grad: ``dict(max_norm=1.0)``, ``dict(type='value', clip_value=0.2)``, or None.
        skip_nonfinite: skip a step whose gradients are not finite, and put batch-norm statistics back. The step then waits
            for the device, unless the optimizer takes ``found_inf`` (``torch.optim.AdamW(fused=True)``).
        sink: receives ``train/grad_norm``; None means mmengine's current message hub if mmengine is imported, else
            :attr:`history`.

    Attributes:
        history: the logged scalars, if there is no other sink.
        last_result: the result of the step in the last iteration; None if no step was due.

    Raises:
        ConfigError: a value out of range, an unknown keyword, or an unknown key in ``clip_grad``.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), clip_grad={"max_norm": 1.0})
        >>> with wrapper.optim_context(model):
        ...     loss = model(torch.ones(4, 2)).mean()
        >>> wrapper.update_params(loss)
    """

    @known_keywords(
        {"opt_level": "ApexOptimWrapper(opt_level=...)", "loss_scale": "AmpOptimWrapper(loss_scale=...)"}
    )
    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
        *,
        skip_nonfinite: bool = False,
        sink: Sink | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.skip_nonfinite = require_flag("skip_nonfinite", skip_nonfinite)
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
        self._norm: Tensor | None = None
        self._num_skipped: Tensor | float = 0.0
        self._num_skipped_on_host: AsyncScalar | None = None
        self._is_reduced = True
        self._models: list[nn.Module] = []
        self._stats = BatchNormStats(())
        self._loaded_stats: list[Tensor] = []

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
            ConfigTypeError: ``loss`` has no ``backward``.
        """
        if not hasattr(loss, "backward"):
            raise ConfigTypeError(
                f"update_params needs a loss tensor, not {type(loss).__name__}; pass model(...).mean()"
            )
        self.last_result = None
        self.backward(self.scale_loss(loss))
        if self.should_update():
            self.step(**(step_kwargs or {}))
            if self.last_result is None:  # an override has stepped by itself
                zero = torch.zeros((), dtype=torch.float32)
                self.last_result = StepResult(zero, zero + 1)
            self.zero_grad(**(zero_kwargs or {}))
        else:
            # torch's schedulers read this flag to warn of a missing optimizer step. Inside a window no step is due.
            self._opt_called = True

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward, and count one backward pass. Gradients add up until :meth:`zero_grad`.

        Args:
            loss: already divided by :meth:`scale_loss`.
            kwargs: passed to ``Tensor.backward``.
        """
        self.last_result = None
        with casts_on(None):
            loss.backward(**kwargs)
        self._inner_count += 1

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Clip, then step, or skip with ``skip_nonfinite``. Gradients stay until :meth:`zero_grad`.

        Args:
            closure: for optimizers such as LBFGS; it calls :meth:`zero_grad` and :meth:`backward` and returns the loss.
            kwargs: further arguments of the optimizer's own ``step``.

        Raises:
            OrderError: the last backward pass did not reduce its gradients over the ranks.
            ClosureError: a closure with ``accumulative_counts`` above 1.
            LossScaleCollapse: with ``skip_nonfinite``: 100 steps in a row were skipped, or a closure's gradients are not
                finite.
        """
        with disable_casts():
            if closure is not None:
                self.optimizer.step(closure=self._checking(closure), **kwargs)
                found_inf = torch.zeros((), dtype=torch.float32)
            else:
                self._require_reduced()
                found_inf = self._clip_and_check()
                self._step_unless(found_inf, kwargs)
            self._end_step(found_inf)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop the gradients, and with them an open accumulation window. Arguments are those of the optimizer's own."""
        self.optimizer.zero_grad(*args, **kwargs)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Generator[None]:
        """Run the forward pass of ``model``, under ``no_sync`` inside an accumulation window."""
        if self.skip_nonfinite:
            self._watch_statistics(unwrap(model))
        with self._reducing(model), casts_on(None):
            yield

    def _clip_grad(self) -> None:
        """Clip the gradients and log their norm, as :meth:`step` does if ``clip_grad`` was given."""
        grads = self._gradients()
        norm = self._clip(grads) if grads else None
        if norm is not None:
            self._norm = norm
            self.message_hub.update_scalar("train/grad_norm", norm)

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Set the number of backward passes so far, and their number in the whole run (-1: unknown).

        May be called again, as GAN training does at the start of each phase.
        """
        done = require_count("init_counts", init_counts, 0, "; write init_counts=1")
        self._max_counts = require_count("max_counts", max_counts, -1, "; write max_counts=1")
        self._inner_count = done
        # Not read here. Overrides written for mmengine read and set this attribute.
        self._remainder_counts = self._max_counts % self._accumulative_counts
        if not (self._accumulation.is_boundary(done - 1) or self._has_window()):
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

    # The end of an epoch and a resume do not end a window.

    @property
    def _accumulation(self) -> Accumulation:
        total = self._max_counts
        return Accumulation(every=self._accumulative_counts, total=total if total > 0 else None)

    def should_update(self) -> bool:
        """Whether a step is due after the last backward pass."""
        return self._accumulation.is_boundary(self._inner_count - 1)

    def should_sync(self) -> bool:
        """Whether the next backward pass must reduce its gradients over the ranks."""
        return self._accumulation.is_boundary(self._inner_count)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss divided by the number of backward passes in its window."""
        return loss / self._accumulation.divisor(self._inner_count)

    @property
    def inner_count(self) -> int:
        """The number of backward passes so far."""
        return self._inner_count

    def __repr__(self) -> str:
        kind, every = type(self).__name__, self._accumulative_counts
        return f"Type: {kind}\n_accumulative_counts: {every}\noptimizer: \n{self.optimizer!r}\n"

    @property
    def message_hub(self) -> Sink:
        """The sink of scalars."""
        # Compared with None, because a sink may be a container, which is false while it is empty.
        hub = message_hub() if self._sink is None else self._sink
        return self.history if hub is None else hub

    def stepped(self) -> bool:
        """Whether in the last iteration a step was due and not skipped. Waits for the device.

        Write ``if wrapper.stepped(): scheduler.step()`` to leave skipped steps out of a schedule or a weight average.
        """
        return self.last_result is not None and self.last_result.stepped()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state; inside an accumulation window also the window, under ``"halfpeak"``."""
        saved = self._stats.saved() or self._loaded_stats
        window = save_window(
            self._parameters(), self._inner_count, float(self._loss_scale()), self._held_losses(), saved
        )
        return {**super().state_dict(), **window}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore a state of this class, of another wrapper, or of a plain optimizer.

        Drops the gradients of an open window. Restores the gradients and the count of a saved window.

        Raises:
            StateError: the state does not fit. Nothing was loaded.
        """
        super().load_state_dict(state_dict)
        for parameter in self._parameters():
            parameter.grad = None
        if WINDOW_KEY in state_dict:
            self._load_window(state_dict[WINDOW_KEY])

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that :meth:`load_state_dict` would accept ``state_dict``.

        Raises:
            StateError: it would not.
        """
        super().check_state_dict(state_dict)
        if WINDOW_KEY in state_dict:
            check_window(state_dict[WINDOW_KEY], self._parameters())

    def _load_window(self, saved: Mapping[str, Any]) -> None:
        self._inner_count = saved["inner_count"]
        load_gradients(saved, self._parameters(), float(self._loss_scale()))
        self._loaded_stats = [buffer.clone() for buffer in saved["buffers"]]
        self._stats.restore_saved(self._loaded_stats)

    def _loss_scale(self) -> Tensor | float:
        """The factor on the gradients between two passes of a window; a tensor is on its device, unread."""
        return 1.0

    def _held_losses(self) -> list[int]:
        """The numbers of the losses whose gradients are held: a later pass reduces them over the ranks."""
        return []

    # Gradients.

    def _parameters(self) -> list[Tensor]:
        return params_of(self.optimizer)

    def _gradients(self) -> list[Tensor]:
        """The gradients that a step would read."""
        return [p.grad for p in self._parameters() if p.requires_grad and p.grad is not None]

    def _has_window(self) -> bool:
        """Whether there are gradients of an open window."""
        return any(parameter.grad is not None for parameter in self._parameters())

    def _found_inf(self) -> Tensor:
        """1 if a gradient that a step would read is not finite.  # f32[]"""
        grads = self._gradients()
        found_inf = torch.zeros((), dtype=torch.float32, device=grads[0].device if grads else None)
        foreach.check_(grads, found_inf)
        return found_inf

    def _clip_and_check(self) -> Tensor:
        """Clip, if ``clip_grad`` was given; 1 if the step must be skipped for a gradient that is not finite.  # f32[]"""
        self._norm = None
        if not self.skip_nonfinite:
            if self.clip_grad_kwargs:
                self._clip_grad()
            return torch.zeros((), dtype=torch.float32)
        # A clip by value hides an inf, and the norm tells of it by itself.
        found_inf = None if isinstance(self._clip, ClipNorm) else self._found_inf()
        if self.clip_grad_kwargs:
            self._clip_grad()
        if self._norm is not None:
            return (~self._norm.isfinite()).float()
        return self._found_inf() if found_inf is None else found_inf

    def _require_reduced(self) -> None:
        if not self._is_reduced:
            raise OrderError(
                "the gradients were not reduced over the ranks, because optim_context was entered for a backward pass "
                "inside a window; enter it once for each backward pass"
            )

    # The step.

    def _step_unless(self, found_inf: Tensor, kwargs: Mapping[str, Any]) -> None:
        """Step the optimizer unless ``found_inf`` is 1.  # f32[]"""
        if not self.skip_nonfinite:
            self.optimizer.step(**kwargs)
        elif takes_found_inf(self.optimizer):
            with passing_found_inf(self.optimizer, found_inf):
                self.optimizer.step(**kwargs)
        elif not bool(found_inf):
            self.optimizer.step(**kwargs)

    def _checking(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """What the optimizer calls in place of a closure: it also clips, and with ``skip_nonfinite`` checks, the gradients."""
        if self._accumulative_counts > 1:
            raise ClosureError(
                "step(closure) evaluates a whole step, so it needs accumulative_counts=1, not "
                f"accumulative_counts={self._accumulative_counts}"
            )

        def evaluate() -> Any:
            loss = closure()
            found_inf = self._clip_and_check()
            if self.skip_nonfinite and bool(found_inf):
                self._collapse("the gradients of the closure are not finite")
            return loss

        return evaluate

    def _end_step(self, found_inf: Tensor) -> None:
        """After a step: its result, batch-norm statistics, and the count of skipped steps in a row."""
        scale = self._loss_scale()
        scale = scale if isinstance(scale, Tensor) else torch.full_like(found_inf, scale)
        self.last_result = StepResult(found_inf, scale, self._norm, has_gradients=self._has_window())
        self._loaded_stats = []
        if not self.skip_nonfinite:
            return
        self._stats.end_step(found_inf)
        self._num_skipped = (self._num_skipped + found_inf) * found_inf
        # Read without waiting, so on an accelerator a step or two late.
        self._num_skipped_on_host = self._num_skipped_on_host or AsyncScalar(found_inf.device)
        self._num_skipped_on_host.push(self._num_skipped)
        if self._num_skipped_on_host.value >= PATIENCE:
            self._collapse(f"{PATIENCE} steps in a row were skipped, because gradients are not finite")

    def _collapse(self, reason: str) -> NoReturn:
        known = {id(p): name for model in self._models for name, p in model.named_parameters()}
        named = (
            (known.get(id(p), f"parameter {number}"), p.grad) for number, p in enumerate(self._parameters())
        )
        raise collapse(reason, nonfinite_names(named), WITHOUT_A_SCALE)

    # The model.

    @contextmanager
    def _reducing(self, model: nn.Module) -> Generator[None]:
        """Let the coming backward pass reduce its gradients over the ranks only if a step is due after it."""
        can_wait = hasattr(model, "no_sync") or hasattr(model, "set_requires_gradient_sync")
        self._is_reduced = self.should_sync() or not can_wait or needs_first_reduction(model)
        with synchronising(model, self._is_reduced):
            yield

    def _watch_statistics(self, model: nn.Module) -> None:
        """Save the batch-norm statistics of ``model``, which a skipped step restores."""
        if not any(model is known for known in self._models):
            self._models.append(model)
            self._stats.add_model(model)
            hook_loads(model, self._stats)
            if self._loaded_stats:
                self._stats.restore_saved(self._loaded_stats)
        self._stats.begin_forward()

    def __getstate__(self) -> dict[str, Any]:
        # A copy begins anew, with the models of its own contexts.
        anew = {
            "_num_skipped_on_host": None,
            "_models": [],
            "_stats": BatchNormStats(()),
            "_loaded_stats": [],
        }
        return {**super().__getstate__(), **anew}
