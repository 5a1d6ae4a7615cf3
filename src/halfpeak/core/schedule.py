"""The loss-scale rule: configuration, state, and one pure transition between states.

Mixed Precision Training, Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2, with bounds, hysteresis and a count
of the skips that could not lower the scale any more.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.torch_compat import is_on_host, read_host


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleConfig:
    """How the loss scale moves. A value; the state is :class:`ScaleState`.

    Attributes:
        init: the first scale.
        dynamic: whether the scale moves at all. A static scale still skips non-finite gradients.
        growth: factor after ``interval`` clean updates in a row.
        backoff: factor after an overflow.
        interval: clean updates in a row before the scale grows.
        hysteresis: overflows it takes before the scale falls.
        refill: when spent hysteresis comes back: after any clean update, or only when the scale grows.
        floor: the scale never falls below this. 2**-14 is the smallest normal float16: a loss of one, scaled by less,
            would itself be subnormal.
        ceiling: the scale never grows above this.
        patience: the overflow in a row that could not lower the scale at which
            :class:`~halfpeak.LossScaleCollapse` is raised; None never raises.

    Raises:
        ConfigError: a value out of its range, or not finite.

    >>> ScaleConfig(init=8.0, interval=100).growth
    2.0
    """

    init: float = 2.0**16
    dynamic: bool = True
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    refill: Literal["clean", "growth"] = "clean"
    floor: float = 2.0**-14
    ceiling: float = 2.0**24
    patience: int | None = 100

    def __post_init__(self) -> None:
        for name in ("init", "growth", "backoff", "floor", "ceiling"):
            require_scale(name, getattr(self, name))
        if not isinstance(self.dynamic, bool):
            raise ConfigError(f"dynamic={self.dynamic!r} must be True or False")
        if self.growth < 1:
            raise ConfigError(f"growth={self.growth!r} must be at least 1; write growth=2.0")
        if self.backoff > 1:
            raise ConfigError(f"backoff={self.backoff!r} must be at most 1; write backoff=0.5")
        for name in ("interval", "hysteresis"):
            _require_count(name, getattr(self, name))
        if self.patience is not None:
            _require_count("patience", self.patience)
        if self.refill not in ("clean", "growth"):
            raise ConfigError(f"refill={self.refill!r} must be 'clean' or 'growth'")
        if self.dynamic and self.floor > self.ceiling:
            raise ConfigError(f"floor={self.floor!r} is above ceiling={self.ceiling!r}")

    @staticmethod
    def static(scale: float = 1.0, *, patience: int | None = 100) -> ScaleConfig:
        """A scale that never moves.

        >>> ScaleConfig.static(128.0).dynamic
        False
        """
        return ScaleConfig(init=scale, dynamic=False, patience=patience)

    @staticmethod
    def bounded(floor: float | None, ceiling: float | None, *, patience: int | None = 100) -> ScaleConfig:
        """A dynamic scale between apex's ``min_loss_scale`` and ``max_loss_scale``.

        None and 0 as ``floor`` were apex's ways of having none, which let its scale fall to zero; here they mean the
        default floor.

        Raises:
            ConfigTypeError: ``ceiling`` is None.
            ConfigError: a bound that is not a finite number above zero.
        """
        if ceiling is None:
            raise ConfigTypeError("max_loss_scale=None is no ceiling; write max_loss_scale=2.**24")
        lowest = require_scale("min_loss_scale", floor) if floor else 2.0**-14
        return ScaleConfig(floor=lowest, ceiling=require_scale("max_loss_scale", ceiling), patience=patience)

    def start(self, device: torch.device | str | None = None) -> ScaleState:
        """The first state. A dynamic scale starts no higher than its ceiling."""
        scale = min(self.init, self.ceiling) if self.dynamic else self.init
        return ScaleState(
            scale=torch.tensor(scale, dtype=torch.float32, device=device),
            clean=torch.tensor(0, dtype=torch.int32, device=device),
            grace=torch.tensor(self.hysteresis, dtype=torch.int32, device=device),
            stuck=torch.tensor(0, dtype=torch.int32, device=device),
        )


class ScaleState(NamedTuple):
    """Where the loss scale stands. Replaced, never edited; all four are scalars on the device.

    Attributes:
        scale: the loss scale.                                               # f32[]
        clean: clean updates since the last overflow or growth.              # i32[]
        grace: overflows left before the scale falls.                        # i32[]
        stuck: overflows in a row that could not lower the scale.            # i32[]
    """

    scale: Tensor
    clean: Tensor
    grace: Tensor
    stuck: Tensor


def advance(config: ScaleConfig, state: ScaleState, found_inf: Tensor) -> ScaleState:
    """The next state after an update whose gradients were finite (``found_inf`` 0) or not (anything else).

    ::

        overflow:  clean = 0;  grace -= 1;  if grace <= 0: scale = max(scale * backoff, floor)
        clean:     clean += 1; grace = hysteresis
                   if clean >= interval: scale = min(scale * growth, ceiling); clean = 0

    A grown scale that would not be finite is not taken. A static scale only counts. Nothing here waits for the device.

    With other constants this one rule is the scaler of apex (interval 2000, no hysteresis), of mmcv (init 2**32,
    interval 1000, floor 1), of ``torch.amp`` (no bounds), of jmp, and of Megatron (hysteresis, refill "growth"). All
    arithmetic is float32, so it is exact as long as the factors are powers of two. It works element by element, so a
    batch of states advances as well as one.

    >>> import torch
    >>> config = ScaleConfig(init=8.0, interval=2)
    >>> state, scales = config.start(), []
    >>> for overflow in (0.0, 0.0, 1.0):
    ...     state = advance(config, state, torch.tensor(overflow))
    ...     scales.append(state.scale.item())
    >>> scales
    [8.0, 16.0, 8.0]
    """
    if is_on_host(*state, found_inf):
        return _advance_on_host(config, state, found_inf)
    overflow = found_inf != 0
    clean = torch.where(overflow, 0, state.clean + 1)
    if not config.dynamic:
        return ScaleState(state.scale, clean, state.grace, torch.where(overflow, state.stuck + 1, 0))
    spent = state.grace - 1
    falls = overflow & (spent <= 0)
    # A scale outside its bounds (loaded, or set by hand) is brought back into them when it next moves, as in apex.
    lowered = torch.clamp(state.scale * config.backoff, min=config.floor)
    stuck = torch.where(
        falls & (lowered >= state.scale), state.stuck + 1, torch.where(overflow, state.stuck, 0)
    )

    grows = ~overflow & (clean >= config.interval)
    raised = state.scale * config.growth
    raised = torch.where(torch.isfinite(raised), torch.clamp(raised, max=config.ceiling), state.scale)

    refills = ~overflow if config.refill == "clean" else grows
    return ScaleState(
        scale=torch.where(falls, lowered, torch.where(grows, raised, state.scale)),
        clean=torch.where(grows, 0, clean),
        grace=torch.where(overflow, spent, torch.where(refills, config.hysteresis, state.grace)),
        stuck=stuck,
    )


def _advance_on_host(config: ScaleConfig, state: ScaleState, found_inf: Tensor) -> ScaleState:
    """:func:`advance` in plain numbers, for a state in host memory: thirty tiny operations are a step's largest cost."""
    scale, clean, grace, stuck = map(read_host, state)
    if read_host(found_inf):
        clean, grace = 0, int(grace) - 1 if config.dynamic else int(grace)
        lowered = max(_single(scale * _single(config.backoff)), _single(config.floor))
        falls = config.dynamic and grace <= 0
        stuck = stuck + 1 if not config.dynamic or (falls and lowered >= scale) else stuck
        scale = lowered if falls else scale
    else:
        clean, stuck = clean + 1, 0
        grows = config.dynamic and clean >= config.interval
        if config.dynamic and (grows or config.refill == "clean"):
            grace = config.hysteresis
        if grows:
            raised = _single(scale * _single(config.growth))
            scale, clean = min(raised, _single(config.ceiling)) if math.isfinite(raised) else scale, 0
    return ScaleState(
        torch.tensor(scale, dtype=torch.float32, device="cpu"),
        *(torch.tensor(int(count), dtype=torch.int32, device="cpu") for count in (clean, grace, stuck)),
    )


def _single(number: float) -> float:
    """Rounded to float32."""
    return ctypes.c_float(number).value


def require_scale(name: str, value: object) -> float:
    """Return ``value`` as a float if it can be a loss scale: a real number, finite and above zero.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(
            f"{name}={short_repr(value)} must be a finite number above zero; write {name}=1024.0"
        )
    limits = torch.finfo(torch.float32)
    if not limits.tiny <= value <= limits.max:
        raise ConfigError(f"{name}={short_repr(value)} is not a normal float32 number; write {name}=1024.0")
    return float(value)


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ConfigError(f"{name}={short_repr(value)} must be an integer from 1 to 2**31 - 1")
