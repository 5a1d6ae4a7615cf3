"""OptimizerHook and GradientCumulativeOptimizerHook: float32 steps. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfpeak.core import state_checks
from halfpeak.core.accumulation import Accumulation
from halfpeak.core.errors import ConfigTypeError, OrderError
from halfpeak.core.optimizer_state import params_of
from halfpeak.core.step_result import StepResult
from halfpeak.core.torch_compat import graph_leaves
from halfpeak.distributed.replicas import synchronising
from halfpeak.engine.config import EngineConfig
from halfpeak.engine.engine import Engine
from halfpeak.engine.prepare import build
from halfpeak.engine.step_hooks import prepared_of
from halfpeak.optim import resume_state
from halfpeak.optim.arguments import require_count, require_flag
from halfpeak.optim.base import BaseOptimWrapper, is_torch_optimizer
from halfpeak.optim.clipping import parse_clip_grad
from halfpeak.optim.registry import keywords_of, unknown_key
from halfpeak.optim.unwrap import unwrap
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.hook import Hook, RunnerView
from halfpeak.runner.hook_list import nested
from halfpeak.runner.log_buffer import LogBuffer
from halfpeak.state.clip import Clip, NoClip


@HOOKS.register_module()
class OptimizerHook(Hook):
    """Takes one step after each training iteration.

    ::

        zero_grad; backward of runner.outputs["loss"]; clip; step, unless a gradient is not finite

    The norm of the gradients before clipping goes to the log as ``grad_norm``, weighted with
    ``runner.outputs["num_samples"]``. Only the step waits for the device.

    Args:
        grad_clip: ``dict(max_norm=35, norm_type=2)``, ``dict(type="value", clip_value=0.2)``, or None.
        detect_anomalous_params: log, before each backward pass, the trainable parameters that the loss does not depend
            on. For debugging, because it walks the whole graph.

    Raises:
        ConfigError: an unknown key in ``grad_clip``, or a value out of range.

    >>> OptimizerHook(grad_clip=dict(max_nrom=1.0))
    Traceback (most recent call last):
    ...
    halfpeak.core.errors.ConfigTypeError: unknown key 'max_nrom' in grad_clip of type 'norm'; allowed: ...
    """

    # Class attributes, because subclasses written for mmcv often do not call ``super().__init__()``.
    grad_clip: Mapping[str, Any] | None = None
    detect_anomalous_params: bool = False
    _steps_foreign: ClassVar[bool] = True
    _engine: Engine | None = None
    _remove: weakref.finalize[Any, Any] | None = None
    _pending: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self, grad_clip: Mapping[str, Any] | None = None, detect_anomalous_params: bool = False
    ) -> None:
        parse_clip_grad(grad_clip, "grad_clip")
        self.grad_clip = grad_clip
        self.detect_anomalous_params = require_flag("detect_anomalous_params", detect_anomalous_params)

    @property
    def _clip(self) -> Clip:
        return parse_clip_grad(self.grad_clip, "grad_clip")

    @property
    def _engine_clip(self) -> Clip:
        """The engine's clip: none if a subclass overrides :meth:`clip_grads`, because the hook calls the override."""
        return NoClip() if self._overrides_clip else self._clip

    @property
    def _overrides_step(self) -> bool:
        return not type(self).after_train_iter.__module__.startswith("halfpeak.")

    @property
    def _overrides_clip(self) -> bool:
        return type(self).clip_grads is not OptimizerHook.clip_grads

    def before_run(self, runner: RunnerView) -> None:
        """Prepare model and optimizer; with an ``after_train_iter`` of user code, only at first use.

        Raises:
            ConfigTypeError: the runner has no optimizer, or several.
            OrderError: another hook or engine already steps the optimizer.
        """
        # User code in after_train_iter may step by itself, for example an optimizer that halfpeak.amp prepared.
        if not self._overrides_step and not self._is_foreign(runner.optimizer):
            self._ready(runner)

    def after_run(self, runner: RunnerView) -> None:
        """Release the optimizer for another runner. With masters it stays prepared, to keep the master weights."""
        if self._engine is not None and not self._engine.masters.accumulates_fp32:
            self._release()

    def around_train_step(self, runner: RunnerView) -> AbstractContextManager[Any] | None:
        """Let the engine see what other code wrote since the last step, because ``train_step`` may not call ``forward``."""
        if self._engine is not None:
            self._engine.context.before_forward()
        return None

    def after_train_iter(self, runner: RunnerView) -> None:
        """Run backward and step the optimizer.

        Raises:
            ConfigTypeError: ``train_step`` returned no loss.
            LossScaleCollapse: gradients stay non-finite.
        """
        if self._is_foreign(runner.optimizer):
            self._step_foreign(runner, require_loss(runner))
            return
        engine, loss = self._ready(runner), require_loss(runner)
        self._zero_grad(runner)
        self._backward(runner, engine, loss)
        self._update(runner, engine, keep_gradients=True)

    def clip_grads(self, params: Iterable[Tensor]) -> Tensor | None:
        """Clip the gradients of ``params``. Return their norm before clipping, or None if it is not computed.

        A parameter with a float32 master stands for its master. If ``grad_clip`` is given, an override is called before
        each step with the optimizer's parameters.
        """
        masters: dict[Tensor, Tensor] = {} if self._engine is None else dict(self._engine.masters)
        params = [masters.get(param, param) for param in params]
        grads = [param.grad for param in params if param.requires_grad and param.grad is not None]
        return self._clip(grads) if grads else None

    def detect_anomalous_parameters(self, loss: Tensor, runner: RunnerView) -> None:
        """Log the trainable parameters that ``loss`` does not depend on."""
        for name, parameter in unreachable_parameters(loss, unwrap(runner.model)):
            runner.logger.log(
                level=logging.ERROR,
                msg=f"{name} with shape {tuple(parameter.shape)} is not in the computational graph",
            )

    def state_dict(self) -> dict[str, Any]:
        """The open window and the overflow counts that ``runner.meta`` lacks, or ``{}``. Waits for the device."""
        found = resume_state.save_resume_state(self._engine) if self._engine is not None else None
        return {} if found is None else {resume_state.RESUME_KEY: found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            StateError: it does not fit. Nothing was loaded.
        """
        if self._engine is None:
            self._pending = state
        elif resume_state.RESUME_KEY in state:
            resume_state.load_resume_state(self._engine, state[resume_state.RESUME_KEY])
            self._engine.load_window_buffers(state[resume_state.RESUME_KEY]["buffers"])
        else:
            self._engine.abort()
            self._engine.load_window_buffers([])

    def _zero_grad(self, runner: RunnerView) -> None:
        runner.optimizer.zero_grad()

    def _is_foreign(self, optimizer: Any) -> bool:
        """Whether ``optimizer`` has ``zero_grad`` and ``step``, is not torch's, and this hook can step it."""
        if not self._steps_foreign or is_torch_optimizer(optimizer) or isinstance(optimizer, Mapping):
            return False
        return callable(getattr(optimizer, "zero_grad", None)) and callable(getattr(optimizer, "step", None))

    def _step_foreign(self, runner: RunnerView, loss: Tensor) -> None:
        """Step an object that is no ``torch.optim.Optimizer`` but has its methods, in the order of mmcv."""
        runner.optimizer.zero_grad()
        if self.detect_anomalous_params:
            self.detect_anomalous_parameters(loss, runner)
        loss.backward()
        norm = None if self.grad_clip is None else self.clip_grads(runner.model.parameters())
        if norm is not None:
            log_norm(runner, norm)
        runner.optimizer.step()

    def _ready(self, runner: RunnerView) -> Engine:
        """The engine of the runner's model and optimizer; rebuilt if the optimizer was replaced."""
        optimizer = require_optimizer(runner, self)
        if self._engine is None or self._engine.optimizers[0] is not optimizer:
            self._release()
            if prepared_of(optimizer) is not None:
                raise OrderError(
                    f"{type(self).__name__} cannot step this {type(optimizer).__name__}: another optimizer hook, "
                    "halfpeak.prepare or amp.initialize steps it already; register one optimizer hook per run, and delete "
                    "the runner of an earlier run first"
                )
            self._engine = engine = self._build(runner, optimizer)
            # Deleting this hook releases the optimizer, so that another hook can prepare it.
            self._remove = weakref.finalize(self, engine.remove)
            self._remove.atexit = False
            if self._pending:
                state, self._pending = self._pending, {}
                self.load_state_dict(state)
        return self._engine

    def _release(self) -> None:
        if self._remove is not None:
            self._remove()
        self._engine = self._remove = None

    def _build(self, runner: RunnerView, optimizer: Optimizer) -> Engine:
        return build(EngineConfig(clip=self._engine_clip), [unwrap(runner.model)], [optimizer])

    def _backward(self, runner: RunnerView, engine: Engine, loss: Tensor, *, delay: bool = False) -> None:
        """Run backward; with ``delay`` gradients stay scaled and unreduced until the last pass of the window."""
        if self.detect_anomalous_params:
            self.detect_anomalous_parameters(loss, runner)
        with engine.scaled(loss, delay=delay) as scaled:
            scaled.backward()

    def _update(self, runner: RunnerView, engine: Engine, *, keep_gradients: bool) -> None:
        """End the window: clip, then step or skip, then log the norm."""
        has_gradients, norm = engine.has_gradients, None
        if self._overrides_clip and self.grad_clip is not None:
            engine.unscale()
            norm = self.clip_grads(params_of(engine.optimizers[0]))
        runner.step_result = result = engine.step(keep_gradients=keep_gradients)
        norm = result.grad_norm if norm is None else norm
        if norm is not None and has_gradients:
            log_norm(runner, norm)


@HOOKS.register_module()
class GradientCumulativeOptimizerHook(OptimizerHook):
    """Takes one step with the mean gradient of every ``cumulative_iters`` iterations.

    Windows are counted from the first iteration of the run, across epochs. A window that the run ends in is shorter,
    and its losses are divided by its own length. ``DistributedDataParallel`` reduces the sum of a window at its end;
    with float32 masters it reduces in every iteration.

    Args:
        cumulative_iters: iterations per step.
        kwargs: arguments of the base class, such as ``grad_clip``.

    Raises:
        ConfigError: ``cumulative_iters`` is not an integer of 1 or more.
        ConfigTypeError: a keyword that the base class does not take.
    """

    _steps_foreign = False

    def __init__(self, cumulative_iters: int = 1, **kwargs: Any) -> None:
        accepted = keywords_of(super().__init__).names
        for key in kwargs:
            if key not in accepted:
                raise ConfigTypeError(unknown_key(type(self).__name__, key, ("cumulative_iters", *accepted)))
        super().__init__(**kwargs)
        self.cumulative_iters = require_count(
            "cumulative_iters", cumulative_iters, hint="; write cumulative_iters=4"
        )
        self._windows: Accumulation | None = None
        self._next_iter = 0
        self._delays = False

    def before_run(self, runner: RunnerView) -> None:
        super().before_run(runner)
        self._windows = None

    def around_train_step(self, runner: RunnerView) -> AbstractContextManager[Any] | None:
        """Keep ``DistributedDataParallel`` from reducing before the last iteration of a window."""
        self._delays = self._can_delay(runner) and not self._windows_of(runner).is_boundary(runner.iter)
        return nested([synchronising(runner.model, not self._delays), super().around_train_step(runner)])

    def after_train_iter(self, runner: RunnerView) -> None:
        """Run backward; step at the end of a window.

        Raises:
            ConfigTypeError: ``train_step`` returned no loss.
            LossScaleCollapse: gradients stay non-finite.
        """
        engine, loss = self._ready(runner), require_loss(runner)
        windows = self._windows_of(runner)
        self._backward(runner, engine, loss / self._get_loss_factor(runner), delay=self._delays)
        self._next_iter = runner.iter + 1
        if windows.is_boundary(runner.iter):
            self._update(runner, engine, keep_gradients=False)
            self._zero_grad(runner)
        else:
            runner.step_result = StepResult(engine.unscale_pending(), engine.scale, boundary=False)

    def state_dict(self) -> dict[str, Any]:
        """The state of :class:`OptimizerHook` and, unless that is ``{}``, the next iteration. Waits for the device."""
        state = super().state_dict()
        return {**state, "iter": self._next_iter} if state else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            StateError: it does not fit. Nothing was loaded.
        """
        next_iter = state_checks.require_count(state.get("iter", 0), "iter")
        super().load_state_dict(state)
        self._next_iter = next_iter
        self._windows = None

    def has_batch_norm(self, module: nn.Module) -> bool:
        """Whether ``module`` is or contains a batch norm."""
        return any(isinstance(part, _BatchNorm) for part in module.modules())

    def _get_loss_factor(self, runner: RunnerView) -> int:
        """The divisor of the iteration's loss. The name of this method is mmcv's."""
        return self._windows_of(runner).divisor(runner.iter)

    def _can_delay(self, runner: RunnerView) -> bool:
        """Whether DDP may reduce once per window. Not with masters, which accumulate gradients after every pass."""
        return (
            isinstance(runner.model, DistributedDataParallel)
            and not self._ready(runner).masters.accumulates_fp32
        )

    def _windows_of(self, runner: RunnerView) -> Accumulation:
        return self._windows or self._begin(runner)

    def _begin(self, runner: RunnerView) -> Accumulation:
        every, total = self.cumulative_iters, runner.max_iters
        self._windows = windows = Accumulation(every=every, total=total)
        engine = self._ready(runner)
        if engine.is_open and self._next_iter != runner.iter:
            engine.abort()  # the open window continues at another iteration
        if runner.iter % every != 0 and not engine.is_open:
            runner.logger.warning(
                "Resume iter number is not divisible by cumulative_iters in "
                "GradientCumulativeOptimizerHook, which means the gradient of some iters is lost and the result may be "
                f"influenced slightly: iteration {runner.iter} lies inside a window of {every}"
            )
        if every > 1 and self.has_batch_norm(runner.model):
            runner.logger.warning(
                "GradientCumulativeOptimizerHook may slightly decrease performance if the model has BatchNorm layers: "
                "their statistics are those of one iteration, not of a window"
            )
        if total is not None and total % every:
            rest = total % every
            runner.logger.warning(
                f"Loss will be divided by {rest} in the last {rest} iterations because they are not enough for "
                f"{every} cumulative_iters"
            )
        return windows


def require_optimizer(runner: RunnerView, hook: object) -> Optimizer:
    """The runner's optimizer; ConfigTypeError if it has none, several, or a wrapper."""
    optimizer: Any = runner.optimizer
    name = type(hook).__name__
    if isinstance(optimizer, BaseOptimWrapper):
        raise ConfigTypeError(
            f"{name} cannot step a {type(optimizer).__name__}, which clips, accumulates and steps by itself; write "
            "optimizer_config=dict(type='OptimWrapperHook')"
        )
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, Mapping):
        raise ConfigTypeError(
            f"{name} steps one optimizer, but the runner has {', '.join(map(repr, optimizer))}; step them in the model's "
            "train_step and write optimizer_config=None"
        )
    raise ConfigTypeError(
        f"{name} needs a torch.optim.Optimizer in runner.optimizer, not {type(optimizer).__name__}; pass optimizer=..."
    )


def log_norm(runner: RunnerView, norm: Tensor) -> None:
    """Log the norm: as a tensor to a :class:`LogBuffer`, which reads it later; as a number to any other buffer."""
    value = norm if isinstance(runner.log_buffer, LogBuffer) else float(norm)
    runner.log_buffer.update({"grad_norm": value}, runner.outputs.get("num_samples", 1))


def require_loss(runner: RunnerView) -> Tensor:
    """The loss that ``train_step`` returned; ConfigTypeError if that is no tensor."""
    outputs: Any = runner.outputs
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(loss, Tensor):
        raise ConfigTypeError(
            f"train_step must return a dict with a tensor as 'loss', not {type(loss).__name__}; write "
            "return dict(loss=loss, num_samples=len(batch))"
        )
    return loss


def unreachable_parameters(loss: Tensor, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trainable parameters that a backward pass of ``loss`` gives no gradient, with their names.

    Call it before ``backward``, which frees the graph.

    >>> model = nn.ModuleDict({"used": nn.Linear(1, 1, bias=False), "idle": nn.Linear(1, 1, bias=False)})
    >>> [name for name, _ in unreachable_parameters(model["used"](Tensor([1.0])).sum(), model)]
    ['idle.weight']
    """
    reached = set() if loss.grad_fn is None else set(map(id, graph_leaves(loss.grad_fn)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in reached and parameter is not loss:
            yield name, parameter
