"""OptimizerHook: a float32 step after each iteration. Answers to mmcv 1.7.2."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import OrderError
from halfpeak.core.levels import Properties
from halfpeak.core.policy import Policy
from halfpeak.core.schedule import ScaleConfig
from halfpeak.engine.checks import lane_of
from halfpeak.engine.engine import Engine
from halfpeak.engine.plan import Plan
from halfpeak.engine.prepare import build
from halfpeak.optim import exact
from halfpeak.optim.wrapped import has_shards, unwrap
from halfpeak.parts.clip import Clip
from halfpeak.parts.verdict import Verdict
from halfpeak.runner.graph import unreachable_parameters
from halfpeak.runner.hook import Hook
from halfpeak.runner.hooks.checks import parse_grad_clip, require_flag, require_loss, require_optimizer

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner


class OptimizerHook(Hook):
    """Takes one step after each training iteration.

    ::

        zero_grad; backward of runner.outputs["loss"]; clip; step, unless a gradient is not finite

    The norm of the gradients before clipping goes to the log as ``grad_norm``, weighted with
    ``runner.outputs["num_samples"]``. Nothing but the step itself waits for the device.

    Args:
        grad_clip: ``dict(max_norm=35, norm_type=2)``, ``dict(type="value", clip_value=0.2)``, or None.
        detect_anomalous_params: log, before each backward pass, the trainable parameters that the loss does not depend
            on. For debugging: it walks the whole graph.

    Raises:
        ConfigError: an unknown key in ``grad_clip``, or a value out of range.

    >>> OptimizerHook(grad_clip=dict(max_nrom=1.0))
    Traceback (most recent call last):
    ...
    halfpeak.core.errors.ConfigError: unknown key 'max_nrom' in grad_clip of type 'norm'; allowed: ...
    """

    # Here, because hooks of somebody's own often do without ``super().__init__()``.
    grad_clip: Mapping[str, Any] | None = None
    detect_anomalous_params: bool = False
    _engine: Engine | None = None
    _remove: weakref.finalize[Any, Any] | None = None
    _pending: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self, grad_clip: Mapping[str, Any] | None = None, detect_anomalous_params: bool = False
    ) -> None:
        parse_grad_clip(grad_clip)
        self.grad_clip = grad_clip
        self.detect_anomalous_params = require_flag("detect_anomalous_params", detect_anomalous_params)

    @property
    def _clip(self) -> Clip:
        return parse_grad_clip(self.grad_clip)

    def before_run(self, runner: BaseRunner) -> None:
        """Make model and optimizer ready; later, if a subclass brings its own ``after_train_iter``.

        Raises:
            ConfigTypeError: the runner has no optimizer, or several.
            OrderError: somebody else steps the optimizer already.
        """
        # A hook of somebody's own may step by itself, an optimizer that halfpeak.amp has prepared for example.
        if type(self).after_train_iter.__module__.startswith("halfpeak."):
            self._ready(runner)

    def after_run(self, runner: BaseRunner) -> None:
        """Let go of the optimizer, so that another runner may take it. Masters stay, or their values would be lost."""
        if self._engine is not None and not self._engine.masters.sum_apart:
            self._release()

    def after_train_iter(self, runner: BaseRunner) -> None:
        """Backward and step.

        Raises:
            ConfigTypeError: ``train_step`` returned no loss.
            LossScaleCollapse: gradients stay non-finite.
        """
        engine, loss = self._ready(runner), require_loss(runner)
        require_optimizer(runner, self).zero_grad()
        self._backward(runner, engine, loss)
        self._update(runner, engine, keep_gradients=True)

    def clip_grads(self, params: Iterable[Tensor]) -> Tensor | None:
        """Clip the gradients of ``params``; their norm before that, None where there are none or nothing measures it."""
        grads = [param.grad for param in params if param.requires_grad and param.grad is not None]
        return self._clip(grads) if grads else None

    def detect_anomalous_parameters(self, loss: Tensor, runner: BaseRunner) -> None:
        """Log the trainable parameters that ``loss`` does not depend on."""
        for name, parameter in unreachable_parameters(loss, unwrap(runner.model)):
            runner.logger.log(
                level=logging.ERROR,
                msg=f"{name} with shape {tuple(parameter.shape)} is not in the computational graph",
            )

    def state_dict(self) -> dict[str, Any]:
        """What is open beyond model, optimizer and ``runner.meta``: ``{}`` between two windows. Waits for the device."""
        found = exact.take_exact(self._engine) if self._engine is not None else None
        return {} if found is None else {exact.KEY: found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            StateError: it does not fit. Nothing was loaded.
        """
        if self._engine is None:
            self._pending = state
        elif exact.KEY in state:
            exact.put_exact(self._engine, state[exact.KEY])
            self._engine.buffers.put_saved(state[exact.KEY]["buffers"])
        else:
            self._engine.abort()
            self._engine.buffers.save()

    def _ready(self, runner: BaseRunner) -> Engine:
        """The engine of the runner's model and optimizer as they are now."""
        optimizer = require_optimizer(runner, self)
        if self._engine is None or self._engine.optimizers[0] is not optimizer:
            self._release()
            if lane_of(optimizer) is not None:
                raise OrderError(
                    f"{type(self).__name__} cannot take {type(optimizer).__name__}, which another hook or halfpeak.prepare "
                    "steps already; register one optimizer hook only, and let an earlier run come to its end"
                )
            self._engine = engine = self._build(runner, optimizer)
            # When this hook is gone, another may take the optimizer.
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

    def _build(self, runner: BaseRunner, optimizer: Optimizer) -> Engine:
        plan = Plan(properties=Properties(), policy=Policy(), scale=ScaleConfig.static(), clip=self._clip)
        verdict = Verdict("world" if has_shards(optimizer) else None)
        return build(plan, [unwrap(runner.model)], [optimizer], verdict=verdict)

    def _backward(self, runner: BaseRunner, engine: Engine, loss: Tensor, *, delay: bool = False) -> None:
        """Backward; with ``delay`` its gradients stay scaled until the pass that ends the window."""
        if self.detect_anomalous_params:
            self.detect_anomalous_parameters(loss, runner)
        with engine.scaled(loss, lanes=engine.lanes, delay=delay) as scaled:
            scaled.backward()

    def _update(self, runner: BaseRunner, engine: Engine, *, keep_gradients: bool) -> None:
        """End the window: clip, step or skip, log."""
        has_gradients = engine.lanes[0].has_gradients()
        runner.step_result = result = engine.step(keep_gradients=keep_gradients)
        if result.grad_norm is not None and has_gradients:
            runner.log_buffer.update({"grad_norm": result.grad_norm}, runner.outputs.get("num_samples", 1))
