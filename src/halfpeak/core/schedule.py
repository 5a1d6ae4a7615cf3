"""The loss-scale rule: its configuration, its state, and one pure function from state to state.

The rule is that of Mixed Precision Training, Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2, with bounds, the
hysteresis of Megatron-LM and a count of the skipped steps that could not lower the scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from halfpeak.core import rule
from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.keywords import known_fields
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import Schema, require_count, unfit
from halfpeak.core.torch_compat import host_values, single

NONFINITE_LOSS: Final = 0.5
"""The value of ``found_inf`` if the loss itself is not finite; with :attr:`ScaleConfig.recovers` the scale then stays.

Below 1, so that an overflow of another pass of the same loss counts: that one a lower scale may avoid.
"""

NO_FLOOR: Final = torch.finfo(torch.float32).tiny
"""The floor of a loss scale that has no other: 2**-126, the smallest normal float32."""


@known_fields
@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleConfig:
    """The immutable configuration of the loss scale; its state is :class:`ScaleState`.

    Attributes:
        init: the first scale.
        dynamic: whether the scale moves. Under a static scale, too, non-finite gradients skip the step.
        growth: factor after ``interval`` clean updates (with finite gradients) in a row.
        backoff: factor after an overflow.
        interval: clean updates in a row before the scale grows.
        hysteresis: overflows until the scale falls.
        refill: when the count of ``hysteresis`` starts again: after any clean update, or only when the scale grows.
        floor: the scale never falls below this. The default 2**-14 is the smallest normal float16, so a smaller scale
            would make a loss of 1 subnormal.
        ceiling: the scale never grows above this.
        patience: the number of overflows in a row that could not lower the scale at which
            :class:`~halfpeak.LossScaleCollapse` is raised; None never raises.
        recovers: whether the scale soon grows again after a fall far below ``init``; see :func:`advance`. True is the default
            of :func:`halfpeak.prepare`; False is the rule of apex, mmcv, ``torch.amp`` and Megatron.

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
    recovers: bool = False

    def __post_init__(self) -> None:
        for name in ("init", "growth", "backoff", "floor", "ceiling"):
            require_scale(name, getattr(self, name))
        for name in ("dynamic", "recovers"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={short_repr(getattr(self, name))} must be True or False")
        if self.growth < 1:
            raise ConfigError(f"growth={short_repr(self.growth)} must be at least 1; write growth=2.0")
        if self.backoff > 1:
            raise ConfigError(f"backoff={short_repr(self.backoff)} must be at most 1; write backoff=0.5")
        for name in ("interval", "hysteresis"):
            _require_count(name, getattr(self, name))
        if self.patience is not None:
            _require_count("patience", self.patience)
        if self.refill not in ("clean", "growth"):
            raise ConfigError(f"refill={short_repr(self.refill)} must be 'clean' or 'growth'")
        if self.dynamic and self.floor > self.ceiling:
            raise ConfigError(f"floor={short_repr(self.floor)} is above ceiling={short_repr(self.ceiling)}")

    @staticmethod
    def static(scale: float = 1.0, *, patience: int | None = 100) -> ScaleConfig:
        """The configuration of a scale that never moves.

        >>> ScaleConfig.static(128.0).dynamic
        False
        """
        return ScaleConfig(init=scale, dynamic=False, patience=patience)

    @staticmethod
    def bounded(floor: float | None, ceiling: float | None, *, patience: int | None = 100) -> ScaleConfig:
        """The configuration of a dynamic scale between apex's ``min_loss_scale`` and ``max_loss_scale``.

        A ``floor`` of None or 0 imposes none. The scale then stops at 2**-126, because a smaller one is not a normal float32,
        and would soon be zero.

        Raises:
            ConfigTypeError: ``ceiling`` is None.
            ConfigError: a bound that is not a finite number above zero.
        """
        if ceiling is None:
            raise ConfigTypeError("max_loss_scale=None is no ceiling; write max_loss_scale=2.**24")
        lowest = require_scale("min_loss_scale", floor) if floor else NO_FLOOR
        return ScaleConfig(floor=lowest, ceiling=require_scale("max_loss_scale", ceiling), patience=patience)

    @property
    def recovery(self) -> Recovery | None:
        """The numbers by which the scale recovers; None without ``recovers`` and for a static scale."""
        if not (self.recovers and self.dynamic):
            return None
        counts = (max(self.interval - left, 0) for left in (3, 12, 96))
        return Recovery(single(min(self.init, self.ceiling) / 16), *counts)

    def start(self, device: torch.device | str | None = None) -> ScaleState:
        """The first state, on ``device``. A dynamic scale starts no higher than its ceiling."""
        scale = min(self.init, self.ceiling) if self.dynamic else self.init
        return ScaleState(
            scale=torch.tensor(scale, dtype=torch.float32, device=device),
            clean=torch.tensor(0, dtype=torch.int32, device=device),
            grace=torch.tensor(self.hysteresis, dtype=torch.int32, device=device),
            stuck=torch.tensor(0, dtype=torch.int32, device=device),
        )


class Recovery(NamedTuple):
    """The scale below which :func:`advance` recovers it, and the values that ``clean`` is set to there.

    Attributes:
        below: a smaller scale is recovered.
        after_growth: ``clean`` after a growth: 3 updates before the next one.
        after_overflow: ``clean`` after an overflow: 12 updates before the next growth.
        after_failure: ``clean`` after an overflow at ``clean >= after_growth``, as soon after a growth: 96 before the next.
    """

    below: float
    after_growth: int
    after_overflow: int
    after_failure: int


class ScaleState(NamedTuple):
    """The state of the loss scale: four scalars on the device. It is replaced, never edited.

    Attributes:
        scale: the loss scale.                                               # f32[]
        clean: clean updates since the last overflow or growth.              # i32[]
        grace: overflows left before the scale falls.                        # i32[]
        stuck: skipped steps in a row that could not lower the scale; see :func:`advance`.  # i32[]
    """

    scale: Tensor
    clean: Tensor
    grace: Tensor
    stuck: Tensor


class ScalerState(TypedDict):
    """The state of one loss scale as plain numbers (see :class:`ScaleState`)."""

    scale: float
    clean: int
    grace: int
    stuck: int


def require_saved_scale(value: object, what: str) -> float:
    """``value`` as a float; raises StateError if :func:`require_scale` does not take it."""
    try:
        return require_scale(what, value)
    except ConfigError:
        raise unfit(value, what, "a number above zero that is finite and normal in float32") from None


SCALER_STATE: Final[Mapping[str, Schema]] = {
    "scale": require_saved_scale,
    "clean": require_count,
    "grace": partial(require_count, least=2 - 2**31),
    "stuck": require_count,
}
"""The schema of a :class:`ScalerState`."""


def advance(config: ScaleConfig, state: ScaleState, found_inf: Tensor) -> ScaleState:
    """The next state after an update whose gradients were finite (``found_inf`` 0) or not (anything else).

    ::

        overflow:  clean = 0;  grace -= 1;  if grace <= 0: scale = max(scale * backoff, floor)
        clean:     clean += 1; grace = hysteresis
                   if clean >= interval: scale = min(scale * growth, ceiling); clean = 0

    A scale that would grow to infinity stays. A static scale only counts. Nothing here waits for the device.

    With ``recovers``, a scale below a sixteenth of its first value soon tries to grow. After an overflow in such an attempt
    the next one comes later, so a network that needs so small a scale skips one step in a hundred::

        below init / 16, after     growth                                clean = interval - 3
                                   an overflow                           clean = interval - 12
                                   an overflow with clean >= interval - 3  clean = interval - 96
        found_inf == 0.5: the loss itself was not finite, which no scale changes, so only stuck += 1
        every second clean update lowers stuck by 1 (without ``recovers`` every clean update sets it to 0)

    So LossScaleCollapse is raised, too, if for long more than a third of the updates are skipped without lowering the scale.

    With other constants this rule is the loss scaler of apex (interval 2000, no hysteresis), mmcv (init 2**32, interval
    1000, floor 1), ``torch.amp`` (no bounds), jmp, and Megatron (hysteresis, refill "growth"). All arithmetic is float32, so
    it is exact as long as the factors are powers of two. All operations are elementwise, so a batch of states works, too.

    >>> import torch
    >>> config = ScaleConfig(init=8.0, interval=2)
    >>> state, scales = config.start(), []
    >>> for overflow in (0.0, 0.0, 1.0):
    ...     state = advance(config, state, torch.tensor(overflow))
    ...     scales.append(state.scale.item())
    >>> scales
    [8.0, 16.0, 8.0]
    """
    known = host_values(*state, found_inf)
    if known is None:
        return ScaleState(*advance_values(config, state, found_inf, where=torch.where))
    *values, found = known
    return on_host(state, values, advance_values(config, values, found, where=pick))


def advance_values(
    config: ScaleConfig, state: Sequence[Any], found_inf: Any, *, where: Any
) -> tuple[Any, ...]:
    """:func:`advance` of tensors, with ``torch.where``, or of Python numbers, with :func:`pick`."""
    clean = state[1] + 1
    if where is pick and not (found_inf or (config.dynamic and clean >= config.interval)):
        # Nearly every update: it cannot move the scale.
        eased = max(state[3] - (clean % 2 == 0), 0) if config.recovers and config.dynamic else 0
        refills = config.dynamic and config.refill == "clean"
        return state[0], clean, config.hysteresis if refills else state[2], eased
    grown, fallen = state[0] * single(config.growth), state[0] * single(config.backoff)
    if where is pick:
        grown, fallen = single(grown), single(fallen)
    numbers = (*state, found_inf, grown, fallen, *numbers_of(config), *switches_of(config), where)
    after: tuple[Any, ...] = rule.advance(*numbers)
    return after if where is pick else tuple(new.to(old.dtype) for new, old in zip(after, state, strict=True))


def numbers_of(config: ScaleConfig) -> tuple[Any, ...]:
    """The numbers of a rule from ``floor`` to ``after_failure``, in the order of :func:`halfpeak.core.rule.advance`.

    ``ops/triton/decide.py`` counts them.
    """
    recovery = config.recovery or (0.0, 0, 0, 0)
    return single(config.floor), single(config.ceiling), config.interval, config.hysteresis, *recovery


def switches_of(config: ScaleConfig) -> tuple[Any, ...]:
    """The arguments ``DYNAMIC``, ``REFILLS_CLEAN`` and ``RECOVERS`` of :func:`halfpeak.core.rule.advance`.

    ``ops/triton/decide.py`` counts them.
    """
    return config.dynamic, config.refill == "clean", config.recovery is not None


def pick(condition: Any, if_true: Any, if_false: Any) -> Any:
    """``torch.where`` of Python numbers."""
    return if_true if condition else if_false


def on_host(before: ScaleState, values: Sequence[Any], after: Sequence[Any]) -> ScaleState:
    """A state in host memory from its numbers; those that did not change keep their tensors."""
    return ScaleState(
        *(
            tensor if new == old else torch.scalar_tensor(new, dtype=tensor.dtype, device="cpu")
            for tensor, old, new in zip(before, values, after, strict=True)
        )
    )


def require_scale(name: str, value: object) -> float:
    """Return ``value`` as a float if it can be a loss scale: a finite number above zero, and normal in float32.

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
