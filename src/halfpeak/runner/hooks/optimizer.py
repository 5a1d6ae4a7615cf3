"""OptimizerHook and GradientCumulativeOptimizerHook: float32 steps. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from halfpeak.core.accumulation import Accumulation
from halfpeak.core.errors import ConfigTypeError
from halfpeak.core.keywords import known_keywords
from halfpeak.core.step_result import NonfiniteGrads, StepResult
from halfpeak.core.torch_compat import graph_leaves
from halfpeak.ops import foreach
from halfpeak.optim.arguments import require_count, require_flag
from halfpeak.optim.base import BaseOptimWrapper
from halfpeak.optim.clipping import parse_clip_grad
from halfpeak.optim.unwrap import unwrap
from halfpeak.parts.batch_norm import BatchNormStats
from halfpeak.parts.nonfinite import PATIENCE, WITHOUT_A_SCALE, collapse, nonfinite_names
from halfpeak.parts.replicas import needs_first_reduction
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.hook import Hook, RunState, nested
from halfpeak.runner.log_buffer import LogBuffer


@HOOKS.register_module()
class OptimizerHook(Hook):
    """Takes one step after each training iteration.

    ::

        zero_grad; backward of runner.outputs["loss"]; clip; step

    The norm of the gradients before clipping goes to the log as ``grad_norm``, weighted with
    ``runner.outputs["num_samples"]``. As in mmcv, nothing looks at the gradients, and a NaN is stepped.

    Args:
        grad_clip: ``dict(max_norm=35, norm_type=2)``, ``dict(type="value", clip_value=0.2)``, or None.
        detect_anomalous_params: log, before each backward pass, the trainable parameters that the loss does not depend
            on. For debugging, because it walks the whole graph.
        skip_nonfinite: skip a step whose gradients are not finite, and put batch-norm statistics back. The step then waits
            for the device.

    Raises:
        ConfigError: an unknown key in ``grad_clip``, or a value out of range.

    >>> OptimizerHook(grad_clip=dict(max_nrom=1.0))
    Traceback (most recent call last):
    ...
    halfpeak.core.errors.ConfigTypeError: grad_clip of type 'norm' takes no 'max_nrom'; did you mean 'max_norm'? ...
    """

    # Class attributes, because subclasses written for mmcv often do not call ``super().__init__()``.
    grad_clip: Mapping[str, Any] | None = None
    detect_anomalous_params: bool = False
    skip_nonfinite: bool = False
    _stats: BatchNormStats | None = None
    _num_skipped: int = 0
    """Skipped steps in a row."""

    @known_keywords()
    def __init__(
        self,
        grad_clip: Mapping[str, Any] | None = None,
        detect_anomalous_params: bool = False,
        *,
        skip_nonfinite: bool = False,
    ) -> None:
        parse_clip_grad(grad_clip, "grad_clip")
        self.grad_clip = grad_clip
        self.detect_anomalous_params = require_flag("detect_anomalous_params", detect_anomalous_params)
        self.skip_nonfinite = require_flag("skip_nonfinite", skip_nonfinite)

    def around_train_step(self, runner: RunState) -> AbstractContextManager[Any] | None:
        """Save the batch-norm statistics, which a skipped step restores."""
        if not self.skip_nonfinite:
            return None
        if self._stats is None:
            self._stats = BatchNormStats([unwrap(runner.model)])
        self._stats.begin_forward()
        return None

    def after_train_iter(self, runner: RunState) -> None:
        """Run backward and step the optimizer.

        Raises:
            ConfigTypeError: ``train_step`` returned no loss, or the runner has not one optimizer.
            LossScaleCollapse: with ``skip_nonfinite``, gradients stay non-finite.
        """
        loss = require_loss(runner)
        self._zero_grad(runner)
        self._backward(runner, loss)
        self._step(runner)

    def clip_grads(self, params: Iterable[Tensor]) -> Tensor | None:
        """Clip the gradients of ``params``. Return their norm before clipping, or None if it is not computed.

        If ``grad_clip`` is given, an override is called before each step with the parameters that the optimizer steps.
        """
        grads = [param.grad for param in params if param.requires_grad and param.grad is not None]
        return parse_clip_grad(self.grad_clip, "grad_clip")(grads) if grads else None

    def detect_anomalous_parameters(self, loss: Tensor, runner: RunState) -> None:
        """Log the trainable parameters that ``loss`` does not depend on."""
        for name, parameter in unreachable_parameters(loss, unwrap(runner.model)):
            runner.logger.log(
                level=logging.ERROR,
                msg=f"{name} with shape {tuple(parameter.shape)} is not in the computational graph",
            )

    def _zero_grad(self, runner: RunState) -> None:
        require_optimizer(runner, self).zero_grad()

    def _backward(self, runner: RunState, loss: Tensor) -> None:
        if self.detect_anomalous_params:
            self.detect_anomalous_parameters(loss, runner)
        loss.backward()

    def _end_pass(self, runner: RunState) -> None:
        """Report an iteration after which no step is due."""
        runner.step_result = StepResult(torch.zeros(()), torch.ones(()), boundary=False)

    def _step(self, runner: RunState) -> None:
        """Clip, log the norm, and step; with ``skip_nonfinite`` unless a gradient is not finite."""
        optimizer = require_optimizer(runner, self)
        params = _stepped(optimizer, runner.model)
        grads = [param.grad for param in params if param.grad is not None]
        skip = self.skip_nonfinite and not foreach.all_finite(grads)
        if self._stats is not None:
            self._stats.end_step(skip)
        nonfinite = self._count_skip(runner) if skip else None
        norm = self._clip(runner, params)
        if not skip:
            self._num_skipped = 0
            optimizer.step()
        runner.step_result = StepResult(
            torch.tensor(float(skip)), torch.ones(()), norm, has_gradients=bool(grads), grads=nonfinite
        )

    def _count_skip(self, runner: RunState) -> NonfiniteGrads:
        """Name the gradients that are not finite; raise LossScaleCollapse after :data:`PATIENCE` skips in a row."""
        names = nonfinite_names((name, p.grad) for name, p in unwrap(runner.model).named_parameters())
        self._num_skipped += 1
        if self._num_skipped >= PATIENCE:
            raise collapse(f"gradients were not finite in {PATIENCE} steps in a row", names, WITHOUT_A_SCALE)
        return NonfiniteGrads(names[::-1], torch.ones(len(names)))

    def _clip(self, runner: RunState, params: Iterable[Tensor]) -> Tensor | None:
        norm = None if self.grad_clip is None else self.clip_grads(params)
        if norm is not None:
            log_norm(runner, norm)
        return norm


@HOOKS.register_module()
class GradientCumulativeOptimizerHook(OptimizerHook):
    """Takes one step with the mean gradient of every ``cumulative_iters`` iterations.

    ::

        backward of loss / cumulative_iters; at the end of a window clip, step, zero_grad

    Windows are counted from the first iteration of the run, across epochs. A window that the run ends in is shorter,
    and its losses are divided by its own length. ``MMDistributedDataParallel`` reduces the sum of a window at its end.

    Args:
        cumulative_iters: iterations per step.
        kwargs: arguments of the base class, such as ``grad_clip``.

    Attributes:
        divisible_iters: the iterations in windows of full length; known after the first iteration, like the next two.
        remainder_iters: the iterations in the last, shorter window.
        initialized: whether the run has begun.

    Raises:
        ConfigError: ``cumulative_iters`` is not an integer of 1 or more.
        ConfigTypeError: a keyword that the base class does not take.
    """

    def __init__(self, cumulative_iters: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.cumulative_iters = require_count(
            "cumulative_iters", cumulative_iters, hint="; write cumulative_iters=4"
        )
        self.divisible_iters = self.remainder_iters = 0
        self.initialized = False
        self._is_local = False

    def before_run(self, runner: RunState) -> None:
        super().before_run(runner)
        self.initialized = False

    def around_train_step(self, runner: RunState) -> AbstractContextManager[Any] | None:
        """Keep ``DistributedDataParallel`` from reducing before the last iteration of a window."""
        wrapped = runner.model
        may_wait = isinstance(wrapped, DistributedDataParallel) and not needs_first_reduction(wrapped)
        self._is_local = may_wait and not self._ends_window(runner)
        return nested([wrapped.no_sync() if self._is_local else None, super().around_train_step(runner)])

    def after_train_iter(self, runner: RunState) -> None:
        """Run backward; step at the end of a window.

        Raises:
            ConfigTypeError: ``train_step`` returned no loss, or the runner has not one optimizer.
            LossScaleCollapse: with ``skip_nonfinite``, gradients stay non-finite.
        """
        loss = require_loss(runner)
        if not self.initialized:
            self._init(runner)
        self._backward(runner, loss / self._get_loss_factor(runner))
        if self._ends_window(runner):
            self._step(runner)
            self._zero_grad(runner)
        else:
            self._end_pass(runner)

    def has_batch_norm(self, module: nn.Module) -> bool:
        """Whether ``module`` is or contains a batch norm."""
        return any(isinstance(part, _BatchNorm) for part in module.modules())

    def _ends_window(self, runner: RunState) -> bool:
        return Accumulation(every=self.cumulative_iters, total=runner.max_iters).is_boundary(runner.iter)

    def _init(self, runner: RunState) -> None:
        """Warn of what the windows of this run imply, and count them. The name of this method is mmcv's."""
        every, total = self.cumulative_iters, runner.max_iters
        if runner.iter % every:
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
        self.remainder_iters = 0 if total is None else total % every
        self.divisible_iters = 0 if total is None else total - self.remainder_iters
        if self.remainder_iters:
            runner.logger.warning(
                f"Loss will be divided by {self.remainder_iters} in the last {self.remainder_iters} iterations because they "
                f"are not enough for {every} cumulative_iters"
            )
        self.initialized = True

    def _get_loss_factor(self, runner: RunState) -> int:
        """The divisor of the iteration's loss. The name of this method is mmcv's."""
        return Accumulation(every=self.cumulative_iters, total=runner.max_iters).divisor(runner.iter)


def require_optimizer(runner: RunState, hook: object) -> Any:
    """The runner's optimizer; ConfigTypeError if it has none, several, or a wrapper."""
    optimizer: Any = runner.optimizer
    name = type(hook).__name__
    if isinstance(optimizer, BaseOptimWrapper):
        raise ConfigTypeError(
            f"{name} cannot step a {type(optimizer).__name__}, which clips, accumulates and steps by itself; write "
            "optimizer_config=dict(type='OptimWrapperHook')"
        )
    if isinstance(optimizer, Mapping):
        raise ConfigTypeError(
            f"{name} steps one optimizer, but the runner has {', '.join(map(repr, optimizer))}; step them in the model's "
            "train_step and write optimizer_config=None"
        )
    if not callable(getattr(optimizer, "step", None)):
        raise ConfigTypeError(
            f"{name} needs a torch.optim.Optimizer in runner.optimizer, not {type(optimizer).__name__}; pass optimizer=..."
        )
    return optimizer


def _stepped(optimizer: Any, model: Any) -> list[Tensor]:
    """The parameters that an optimizer steps; those of the model, if an object without groups stands for an optimizer."""
    groups = getattr(optimizer, "param_groups", None)
    if isinstance(groups, list):
        return [parameter for group in groups for parameter in group["params"]]
    return list(model.parameters())


def log_norm(runner: RunState, norm: Tensor) -> None:
    """Log the norm: as a tensor to a :class:`LogBuffer`, which reads it later; as a number to any other buffer."""
    value = norm if isinstance(runner.log_buffer, LogBuffer) else float(norm)
    runner.log_buffer.update({"grad_norm": value}, runner.outputs.get("num_samples", 1))


def require_loss(runner: RunState) -> Tensor:
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
