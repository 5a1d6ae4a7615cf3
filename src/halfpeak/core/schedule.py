"""The loss-scale rule: its configuration, its state, and one pure function from state to state.

The rule is that of Mixed Precision Training, Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2, with bounds,
hysteresis and a count of the skipped steps that could not lower the scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from halfpeak.core.errors import ConfigError, ConfigTypeError, StateError
from halfpeak.core.keywords import known_fields
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import require_count, require_mapping
from halfpeak.core.torch_compat import host_values, single

NONFINITE_LOSS: Final = 2.0
"""The value of ``found_inf`` if the loss itself is not finite; with :attr:`ScaleConfig.recovers` the scale then stays."""


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

        A ``floor`` of None or 0 means the default floor. In apex it means no floor, so the scale may fall to zero.

        Raises:
            ConfigTypeError: ``ceiling`` is None.
            ConfigError: a bound that is not a finite number above zero.
        """
        if ceiling is None:
            raise ConfigTypeError("max_loss_scale=None is no ceiling; write max_loss_scale=2.**24")
        lowest = require_scale("min_loss_scale", floor) if floor else 2.0**-14
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


def parse_scaler_state(state: object) -> ScalerState:
    """A dict that should be a :class:`ScalerState`, checked and copied.

    Raises:
        StateError: a key is missing or unknown, or a value is out of range.
    """
    values = require_mapping(state, "a loss scaler's state", ScaleState._fields)
    try:
        scale = require_scale("scale", values["scale"])
    except ConfigError as error:
        raise StateError(str(error)) from None
    clean, grace, stuck = (
        require_count(values[name], f"{name} in a loss scaler's state", 2 - 2**31 if name == "grace" else 0)
        for name in ("clean", "grace", "stuck")
    )
    return ScalerState(scale=scale, clean=clean, grace=grace, stuck=stuck)


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
        found_inf == 2: the loss itself was not finite, which no scale changes, so only stuck += 1
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
    known = host_values(state.clean, state.grace, state.stuck, found_inf)
    if known is not None:
        clean, grace, stuck, found = known
        if not (found or (config.dynamic and clean + 1 >= config.interval)):
            return _counted(config, state, clean + 1, grace, stuck)
    overflow = found_inf != 0
    clean = torch.where(overflow, 0, state.clean + 1)
    if not config.dynamic:
        return ScaleState(state.scale, clean, state.grace, torch.where(overflow, state.stuck + 1, 0))
    spent = state.grace - 1
    falls = overflow & (spent <= 0)
    # A scale outside its bounds (loaded, or set by user code) is clamped when it next moves, as in apex.
    lowered = torch.clamp(state.scale * config.backoff, min=config.floor)
    stuck = torch.where(
        falls & (lowered >= state.scale), state.stuck + 1, torch.where(overflow, state.stuck, 0)
    )

    grows = ~overflow & (clean >= config.interval)
    raised = state.scale * config.growth
    raised = torch.where(torch.isfinite(raised), torch.clamp(raised, max=config.ceiling), state.scale)

    refills = ~overflow if config.refill == "clean" else grows
    moved = ScaleState(
        scale=torch.where(falls, lowered, torch.where(grows, raised, state.scale)),
        clean=torch.where(grows, 0, clean),
        grace=torch.where(overflow, spent, torch.where(refills, config.hysteresis, state.grace)),
        stuck=stuck,
    )
    recovery = config.recovery
    return moved if recovery is None else _recovering(recovery, state, moved, found_inf, grows)


def _recovering(
    recovery: Recovery, state: ScaleState, moved: ScaleState, found_inf: Tensor, grows: Tensor
) -> ScaleState:
    """Apply the rules of ``recovers`` to the state ``moved`` that :func:`advance` computes without them."""
    overflow = found_inf != 0
    failed = state.clean >= recovery.after_growth
    credit = torch.where(failed, recovery.after_failure, recovery.after_overflow)
    credit = torch.where(overflow, credit, recovery.after_growth).to(state.clean.dtype)
    clean = torch.where((moved.scale < recovery.below) & (overflow | grows), credit, moved.clean)
    eased = torch.clamp(state.stuck - (clean % 2 == 0).to(torch.int32), min=0)
    changed = ScaleState(moved.scale, clean, moved.grace, torch.where(overflow, moved.stuck, eased))
    stays = state._replace(stuck=state.stuck + 1)
    is_loss = found_inf == NONFINITE_LOSS
    return ScaleState(*(torch.where(is_loss, old, new) for old, new in zip(stays, changed, strict=True)))


def _counted(config: ScaleConfig, state: ScaleState, clean: int, grace: int, stuck: int) -> ScaleState:
    """:func:`advance` in plain numbers: for a state in host memory and a clean update that does not move the scale.

    Nearly all updates are such, and the thirty tiny tensor operations of :func:`advance` would be a step's largest cost.

    Args:
        state: before.
        clean: after the update.
        grace: before.
        stuck: before.
    """
    eased = max(stuck - (clean % 2 == 0), 0) if config.recovers and config.dynamic else 0
    refilled = config.hysteresis if config.dynamic and config.refill == "clean" else grace
    return ScaleState(
        state.scale,
        _int32(clean),
        state.grace if refilled == grace else _int32(refilled),
        state.stuck if eased == stuck else _int32(eased),
    )


def _int32(number: int) -> Tensor:
    return torch.scalar_tensor(number, dtype=torch.int32, device="cpu")


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
