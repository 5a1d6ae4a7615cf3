"""``LossScaler`` and ``DynamicLossScaler`` of ``apex.fp16_utils`` as of apex 25.04: loss scaling by hand.

Neither is deprecated here. Both check every gradient element. apex's dynamic scaler checked the sum, which large finite
gradients can overflow, and its static scaler checked nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from halfpeak.core.dtypes import largest
from halfpeak.core.errors import ConfigError
from halfpeak.core.keywords import unknown_key
from halfpeak.core.schedule import NO_FLOOR, ScaleConfig, ScaleState, advance, require_scale
from halfpeak.ops import foreach

DYNAMIC_ARGUMENTS: Final = ("init_scale", "scale_factor", "scale_window", "min_loss_scale", "max_loss_scale")


class LossScaler:
    """A loss scale that never moves.

    Attributes:
        cur_scale: the scale.

    Raises:
        ConfigError: the scale is not a finite number above zero.

    >>> scaler = LossScaler(128.0)
    >>> weight = nn.Parameter(torch.ones(1))
    >>> scaler.backward(weight.sum())
    >>> weight.grad, scaler.has_overflow([weight])
    (tensor([128.]), False)
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = require_scale("scale", scale)

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of ``params`` has an element that is not finite. Waits for the device."""
        return not foreach.all_finite([parameter.grad for parameter in params if parameter.grad is not None])

    def update_scale(self, overflow: bool) -> None:
        """Do nothing."""

    def scale_gradient(
        self, module: nn.Module, grad_in: Sequence[Tensor | None], grad_out: Any
    ) -> tuple[Tensor | None, ...]:
        """Multiply a module's input gradients by the scale: a full backward hook."""
        return tuple(None if grad is None else grad * self.cur_scale for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run backward from the loss times the scale."""
        (loss * self.cur_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that falls on overflow and grows after ``scale_window`` updates without one.

    The rule is :func:`halfpeak.core.schedule.advance` with a floor of 1. The state is apex's three attributes, which can be
    read, set and saved.

    Attributes:
        cur_scale: the scale.
        cur_iter: updates so far.
        last_overflow_iter: the last update that overflowed, or -1.

    Raises:
        ConfigError: an argument is out of its range.

    >>> scaler = DynamicLossScaler(init_scale=4.0, scale_window=3)
    >>> for overflow in (False, False, True, False):
    ...     scaler.update_scale(overflow)
    >>> scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter
    (2.0, 4, 2)
    """

    def __init__(
        self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        self._rule = ScaleConfig(
            init=init_scale,
            growth=require_scale("scale_factor", scale_factor),
            backoff=1 / scale_factor,
            interval=scale_window,
            floor=1.0,
            ceiling=largest(torch.float32),
            patience=None,
        )
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1

    @property
    def scale_factor(self) -> float:
        """The factor by which the scale grows and falls."""
        return self._rule.growth

    @property
    def scale_window(self) -> int:
        """Updates without overflow before the scale grows."""
        return self._rule.interval

    def update_scale(self, overflow: bool) -> None:
        """Move the scale by one update."""
        state = ScaleState(
            scale=torch.tensor(self.cur_scale, dtype=torch.float32),
            clean=torch.tensor((self.cur_iter - self.last_overflow_iter - 1) % self._rule.interval),
            grace=torch.tensor(self._rule.hysteresis),
            stuck=torch.tensor(0),
        )
        self.cur_scale = advance(self._rule, state, torch.tensor(bool(overflow))).scale.item()
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1


def dynamic_config(arguments: Mapping[str, Any]) -> ScaleConfig:
    """Return the loss-scale rule with ``FP16_Optimizer``'s ``dynamic_loss_args`` in place of halfpeak's defaults.

    Raises:
        ConfigError: an unknown key, or a value out of its range.
    """
    for key in arguments:
        if key not in DYNAMIC_ARGUMENTS:
            raise ConfigError(unknown_key("dynamic_loss_args", key, DYNAMIC_ARGUMENTS))
    given = {name: value for name, value in arguments.items() if value is not None}
    default = ScaleConfig()
    factor = require_scale("scale_factor", given.get("scale_factor", default.growth))
    return ScaleConfig(
        init=given.get("init_scale", default.init),
        growth=factor,
        backoff=1 / factor,
        interval=given.get("scale_window", default.interval),
        floor=given.get("min_loss_scale", NO_FLOOR),
        ceiling=given.get("max_loss_scale", default.ceiling),
    )
