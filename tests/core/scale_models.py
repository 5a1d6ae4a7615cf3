"""Other libraries' loss-scale rules in plain Python, written from descriptions, to compare ``advance`` with.

``scale`` is the scale after ``update(overflow)``. ``advance`` with the constants in ``config`` should give the same scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch

from halfpeak.core.schedule import ScaleConfig

LIMITS = torch.finfo(torch.float32)
"""Floor and ceiling for rules without bounds of their own: the range of normal float32 numbers."""


class ScaleModel(Protocol):
    @property
    def scale(self) -> float: ...

    config: ScaleConfig
    span: tuple[float, float]
    """Range that a tested history must not leave; finite only on a side where the rule has no bound of its own."""

    def update(self, overflow: bool) -> None: ...


class Apex:
    """apex 25.04 ``amp.LossScaler.update_scale``: factor 2, counts clean updates, bounded above, floor optional."""

    span = (2.0**-120, math.inf)

    def __init__(
        self, *, init: float = 2.0**16, window: int = 2000, low: float | None = None, high: float = 2.0**24
    ):
        self.scale = min(high, init)
        self.unskipped = 0
        self.window, self.low, self.high = window, low, high
        self.config = ScaleConfig(init=init, interval=window, floor=low or LIMITS.tiny, ceiling=high)

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = self.scale / 2 if not self.low else max(self.low, self.scale / 2)
            self.unskipped = 0
        else:
            self.unskipped += 1
        if self.unskipped == self.window:
            self.scale = min(self.high, self.scale * 2)
            self.unskipped = 0


class Mmcv:
    """mmcv 1.7.2 ``LossScaler`` and apex ``fp16_utils.DynamicLossScaler``: counts from the last overflow; floor 1."""

    span = (0.0, 2.0**120)

    def __init__(self, *, init: float = 2.0**32, factor: float = 2.0, window: int = 1000):
        self.scale = init
        self.iteration, self.last_overflow = 0, -1
        self.factor, self.window = factor, window
        self.config = ScaleConfig(
            init=init, growth=factor, backoff=1 / factor, interval=window, floor=1.0, ceiling=LIMITS.max
        )

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.scale / self.factor, 1)
            self.last_overflow = self.iteration
        elif (self.iteration - self.last_overflow) % self.window == 0:
            self.scale *= self.factor
        self.iteration += 1


class Torch:
    """The rule of ``torch.amp.GradScaler``, which calls ``torch._amp_update_scale_``: no bounds."""

    span = (2.0**-120, math.inf)

    def __init__(
        self, *, init: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ):
        self._scale = torch.tensor(init)
        self._tracker = torch.tensor(0, dtype=torch.int32)
        self._constants = (growth, backoff, interval)
        self.config = ScaleConfig(
            init=init,
            growth=growth,
            backoff=backoff,
            interval=interval,
            floor=LIMITS.tiny,
            ceiling=LIMITS.max,
        )

    @property
    def scale(self) -> float:
        return self._scale.item()

    def update(self, overflow: bool) -> None:
        torch._amp_update_scale_(self._scale, self._tracker, torch.tensor(float(overflow)), *self._constants)


class Megatron:
    """Megatron's ``DynamicGradScaler``: hysteresis is refilled only when the scale grows."""

    span = (0.0, 2.0**120)

    def __init__(self, *, init: float = 2.0**32, low: float = 1.0, interval: int = 1000, hysteresis: int = 2):
        self.scale = init
        self.low, self.interval, self.hysteresis = low, interval, hysteresis
        self.clean, self.left = 0, hysteresis
        self.config = ScaleConfig(
            init=init,
            interval=interval,
            hysteresis=hysteresis,
            refill="growth",
            floor=low,
            ceiling=LIMITS.max,
        )

    def update(self, overflow: bool) -> None:
        if overflow:
            self.clean = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale * 0.5, self.low)
        else:
            self.clean += 1
            if self.clean == self.interval:
                self.clean, self.left = 0, self.hysteresis
                self.scale *= 2.0


class ApexHysteresis:
    """apex's ``update_scale_hysteresis`` kernel: any clean update refills the hysteresis; the floor is ours."""

    span = (2.0**-120, math.inf)

    def __init__(
        self,
        *,
        init: float = 2.0**16,
        interval: int = 2000,
        hysteresis: int = 2,
        factors: tuple[float, float] = (2.0, 0.5),
    ):
        self.scale = init
        self.interval, self.hysteresis = interval, hysteresis
        self.growth, self.backoff = factors
        self.clean, self.left = 0, hysteresis
        self.config = ScaleConfig(
            init=init, interval=interval, hysteresis=hysteresis, floor=LIMITS.tiny, ceiling=LIMITS.max
        )

    def update(self, overflow: bool) -> None:
        if overflow:
            self.left -= 1
            self.clean = 0
            if self.left <= 0:
                self.scale = max(self.scale * self.backoff, LIMITS.tiny)
        else:
            self.clean += 1
            if self.clean == self.interval:
                grown = self.scale * self.growth
                self.scale = grown if math.isfinite(grown) and grown <= LIMITS.max else self.scale
                self.clean = 0
            self.left = self.hysteresis


CASES: dict[str, Callable[[], ScaleModel]] = {
    "apex": Apex,
    "apex, short window, no floor": lambda: Apex(window=3),
    "apex, floor": lambda: Apex(window=7, low=2.0**14),
    "apex, floor above the start": lambda: Apex(window=7, low=2.0**20),
    "apex, low ceiling": lambda: Apex(window=2, high=128.0),
    "mmcv": Mmcv,
    "mmcv, short window": lambda: Mmcv(init=8.0, window=3),
    "mmcv, factor 4": lambda: Mmcv(init=2.0**20, factor=4.0, window=10),
    "torch": Torch,
    "torch, short interval": lambda: Torch(init=2.0**8, interval=4),
    "torch, interval 1": lambda: Torch(interval=1),
    "torch, at the top": lambda: Torch(init=2.0**126, interval=12),
    "torch, factors that round": lambda: Torch(growth=1.5, backoff=0.625, interval=2),
    "Megatron": Megatron,
    "Megatron, short interval": lambda: Megatron(init=2.0**12, interval=4),
    "Megatron, hysteresis 5": lambda: Megatron(init=2.0**12, interval=6, hysteresis=5),
    "apex hysteresis": ApexHysteresis,
    "apex hysteresis, short interval": lambda: ApexHysteresis(interval=3),
    "apex hysteresis 4": lambda: ApexHysteresis(interval=5, hysteresis=4),
}
