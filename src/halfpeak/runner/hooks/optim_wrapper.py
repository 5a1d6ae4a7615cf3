"""OptimWrapperHook: steps an optimizer wrapper after each iteration."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from halfpeak.core.errors import ConfigTypeError
from halfpeak.core.step_result import StepResult
from halfpeak.optim.wrapper import OptimWrapper
from halfpeak.optim.wrapper_dict import OptimWrapperDict
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.hook import Hook, RunState
from halfpeak.runner.hooks.optimizer import log_norm, require_loss


@HOOKS.register_module()
class OptimWrapperHook(Hook):
    """Steps the runner's :class:`~halfpeak.optim.OptimWrapper`, which accumulates, clips and sets the precision.

    ``train_step`` runs inside ``optim_context``. The result of the step is in ``runner.step_result`` for later hooks,
    and the gradient norm in the log.

    Example:
        >>> import torch
        >>> from halfpeak.optim import AmpOptimWrapper
        >>> from halfpeak.runner import EpochBasedRunner
        >>> class Model(torch.nn.Linear):
        ...     def train_step(self, data, optimizer):
        ...         return dict(loss=self(data).float().square().mean())
        >>> model = Model(2, 1)
        >>> wrapper = AmpOptimWrapper(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2)
        >>> runner = EpochBasedRunner(model, optimizer=wrapper, max_epochs=1)
        >>> runner.register_optimizer_hook(dict(type="OptimWrapperHook"))
        >>> runner.run([torch.ones(4, 3, 2)], [("train", 1)])
        >>> runner.iter, runner.steps
        (4, 2)
    """

    def before_run(self, runner: RunState) -> None:
        """Tell the wrapper the current iteration and the length of the run.

        Raises:
            ConfigTypeError: the optimizer is no wrapper.
        """
        wrapper = _wrapper_of(runner)
        wrapper.initialize_count_status(runner.model, runner.iter, runner.max_iters or -1)
        with wrapper.optim_context(runner.model):
            pass  # a wrapper converts its model in the first optim_context; validation may come before training

    def around_train_step(self, runner: RunState) -> AbstractContextManager[Any]:
        return _wrapper_of(runner).optim_context(runner.model)

    def after_train_iter(self, runner: RunState) -> None:
        """Run backward, and step at the end of an accumulation window.

        Raises:
            ConfigTypeError: ``train_step`` returned no loss.
            LossScaleCollapse: gradients stay non-finite and the scale cannot fall any further.
        """
        wrapper, loss = _wrapper_of(runner), require_loss(runner)
        wrapper.update_params(loss)
        result = wrapper.last_result
        if result is None:
            nothing = torch.zeros((), dtype=torch.float32, device=loss.device)
            runner.step_result = StepResult(nothing, nothing, boundary=False)
            return
        runner.step_result = result
        if result.grad_norm is not None:
            log_norm(runner, result.grad_norm)


def _wrapper_of(runner: RunState) -> OptimWrapper:
    wrapper: Any = runner.optimizer
    if isinstance(wrapper, OptimWrapper) and not isinstance(wrapper, OptimWrapperDict):
        return wrapper
    raise ConfigTypeError(
        f"OptimWrapperHook steps one OptimWrapper, but the runner's optimizer is of type {type(wrapper).__name__}; pass "
        "optimizer=OptimWrapper(...), or step several in the model's train_step and write optimizer_config=None"
    )
