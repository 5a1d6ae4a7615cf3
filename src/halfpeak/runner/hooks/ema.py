"""EMAHook: a moving average of the weights. Compatible with mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from halfpeak.core import state_checks
from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr
from halfpeak.optim.arguments import require_count, require_number
from halfpeak.optim.unwrap import unwrap
from halfpeak.parts.pairs import float32_values
from halfpeak.runner.builder import HOOKS
from halfpeak.runner.hook import Hook, RunState


@HOOKS.register_module()
class EMAHook(Hook):
    """Averages the weights over optimizer steps, and puts the averages into the model between epochs.

    ::

        after every interval-th step n:   average = (1 - m) * average + m * weights
                                          m = min(1 - (1 - momentum) ** interval, (1 + n) / (warm_up + n))
        after a training epoch:           swap weights and averages, for validation and checkpoints
        before the next training epoch:   swap back

    An iteration without a step changes no average. The hook averages the float32 masters, if there are any. It waits for the
    device only to learn whether a step was skipped.

    Args:
        momentum: weight of the new parameters in the average, per step.
        interval: steps between two updates; an update has the momentum of ``interval`` steps.
        warm_up: greater values make the average change more slowly at the start.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(self, momentum: float = 0.0002, interval: int = 1, warm_up: int = 100) -> None:
        if not 0 < require_number("momentum", momentum) < 1:
            raise ConfigError(
                f"momentum={short_repr(momentum)} must be above 0 and below 1; write momentum=0.0002"
            )
        require_count("interval", interval)
        require_count("warm_up", warm_up)
        self.momentum = 1 - (1 - momentum) ** min(interval, 2**53)
        self.interval = interval
        self.warm_up = warm_up
        self._averages: dict[str, Tensor] = {}
        self._steps = 0
        self._is_swapped = False

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """The values outside the model: the averages during a training epoch, the weights between two epochs."""
        return dict(self._averages)

    def before_run(self, runner: RunState) -> None:
        self._averages = {name: value.clone() for name, value in _weights(runner).items()}
        self._steps, self._is_swapped = 0, False

    def before_train_epoch(self, runner: RunState) -> None:
        if self._is_swapped:
            self._swap(runner)

    def after_train_iter(self, runner: RunState) -> None:
        if runner.step_result is not None and not runner.step_result.stepped():
            return
        step, self._steps = self._steps, self._steps + 1
        if step % self.interval == 0:
            momentum = min(self.momentum, (1 + step) / (self.warm_up + step))
            current = _weights(runner)
            averages = list(self._averages.values())
            get_ema_multi_avg_fn(1 - momentum)(averages, [current[name] for name in self._averages], None)

    def after_train_epoch(self, runner: RunState) -> None:
        if not self._is_swapped:
            self._swap(runner)

    def state_dict(self) -> dict[str, Any]:
        """The values outside the model, and the number of steps."""
        return {"averages": dict(self._averages), "steps": self._steps, "is_swapped": self._is_swapped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            StateError: it is something else. Nothing was loaded.
        """
        averages, count = {**self._averages, object: ...}, state_checks.require_count
        state_checks.require(state, "state", {"averages": averages, "steps": count, "is_swapped": bool})
        for name, average in self._averages.items():
            average.copy_(state["averages"][name])
        self._steps, self._is_swapped = state["steps"], state["is_swapped"]

    def _swap(self, runner: RunState) -> None:
        before = {name: value.clone() for name, value in _weights(runner).items()}
        # load_state_dict gives exact values to float32 masters.
        unwrap(runner.model).load_state_dict(self._averages, strict=False)
        self._averages, self._is_swapped = before, not self._is_swapped


def _weights(runner: RunState) -> dict[str, Tensor]:
    """The float32 values of the parameters, by name: their own memory, or that of their masters."""
    named = dict(unwrap(runner.model).named_parameters())
    return dict(zip(named, float32_values(named.values()), strict=True))
