"""GradientCumulativeOptimizerHook: one step for several iterations. Answers to mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from halfpeak.core.accumulation import Accumulation
from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.outcome import StepResult
from halfpeak.engine.sync import synchronising
from halfpeak.optim.registry import keywords_of, unknown_key
from halfpeak.runner.hook_list import nested
from halfpeak.runner.hooks.checks import require_loss
from halfpeak.runner.hooks.optimizer import OptimizerHook

if TYPE_CHECKING:
    from halfpeak.runner.base import BaseRunner


class GradientCumulativeOptimizerHook(OptimizerHook):
    """Takes one step, of the mean gradient, for every ``cumulative_iters`` iterations.

    Windows are counted from the first iteration of the run, whatever the epochs. The last one is shorter where the run
    ends inside it, and its losses are divided by its own length. ``DistributedDataParallel`` reduces the sums of a window
    at its end, not each iteration's gradients.

    Args:
        cumulative_iters: iterations per step.
        kwargs: of the next hook: ``grad_clip``, ``detect_anomalous_params``.

    Raises:
        ConfigError: ``cumulative_iters`` is not an integer of 1 or more.
        ConfigTypeError: a keyword that the next hook does not take.
    """

    def __init__(self, cumulative_iters: int = 1, **kwargs: Any) -> None:
        taken = keywords_of(super().__init__).names
        for key in kwargs:
            if key not in taken:
                raise ConfigTypeError(unknown_key(type(self).__name__, key, ("cumulative_iters", *taken)))
        super().__init__(**kwargs)
        if (
            isinstance(cumulative_iters, bool)
            or not isinstance(cumulative_iters, int)
            or cumulative_iters < 1
        ):
            raise ConfigError(
                f"cumulative_iters={cumulative_iters!r} must be an integer of 1 or more; write cumulative_iters=4"
            )
        self.cumulative_iters = cumulative_iters
        self._windows: Accumulation | None = None
        self._passed = 0
        self._waits = False

    def before_run(self, runner: BaseRunner) -> None:
        """Make model and optimizer ready, and look at the length of the run anew."""
        super().before_run(runner)
        self._windows = None

    def around_train_step(self, runner: BaseRunner) -> AbstractContextManager[Any] | None:
        """No reduction by ``DistributedDataParallel`` before the last iteration of a window."""
        self._waits = self._can_wait(runner) and not self._windows_of(runner).is_boundary(runner.iter)
        return nested([synchronising(runner.model, not self._waits), super().around_train_step(runner)])

    def after_train_iter(self, runner: BaseRunner) -> None:
        """Backward; step at the end of a window.

        Raises:
            ConfigTypeError: ``train_step`` returned no loss.
            LossScaleCollapse: gradients stay non-finite.
        """
        engine, loss = self._ready(runner), require_loss(runner)
        windows = self._windows_of(runner)
        self._backward(runner, engine, loss / windows.divisor(runner.iter), delay=self._waits)
        self._waits = False
        self._passed = runner.iter + 1
        if windows.is_boundary(runner.iter):
            self._update(runner, engine, keep_gradients=False)
        else:
            engine.lanes[0].take_in()
            found_inf = engine.lanes[0].found_inf
            runner.step_result = StepResult(found_inf, engine.scale, boundary=False)

    def state_dict(self) -> dict[str, Any]:
        """The open window, and the iteration that it goes on with; ``{}`` where none is open. Waits for the device."""
        state = super().state_dict()
        return {**state, "iter": self._passed} if state else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            StateError: it does not fit. Nothing was loaded.
        """
        super().load_state_dict(state)
        self._passed = state.get("iter", 0)
        self._windows = None

    def has_batch_norm(self, module: nn.Module) -> bool:
        """Whether ``module`` is or contains a batch norm."""
        return any(isinstance(part, _BatchNorm) for part in module.modules())

    def _can_wait(self, runner: BaseRunner) -> bool:
        """Whether DDP may sum a window first. Low gradients are taken into their float32 masters one by one instead."""
        return isinstance(runner.model, DistributedDataParallel) and not self._ready(runner).masters.sum_apart

    def _windows_of(self, runner: BaseRunner) -> Accumulation:
        return self._windows or self._begin(runner)

    def _begin(self, runner: BaseRunner) -> Accumulation:
        every, total = self.cumulative_iters, runner.max_iters
        self._windows = windows = Accumulation(every=every, total=total)
        engine = self._ready(runner)
        if engine.has_open_window and self._passed != runner.iter:
            engine.abort()  # of another iteration than the one that comes now
        if runner.iter % every != 0 and not engine.has_open_window:
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
