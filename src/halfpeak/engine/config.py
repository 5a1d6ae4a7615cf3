"""EngineConfig: the configuration of an engine, as one immutable value."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfpeak.core.accumulation import Accumulation
from halfpeak.core.errors import ConfigError
from halfpeak.core.levels import Properties
from halfpeak.core.policy import Policy
from halfpeak.core.schedule import ScaleConfig
from halfpeak.core.short_repr import short_repr
from halfpeak.parts.clip import Clip, NoClip


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The configuration of an engine, without its state; by default float32 training without a loss scale.

    Attributes:
        properties: the opt level with its overrides applied.
        policy: the dtype in which each thing is stored, computed and returned.
        scale: how each loss scale moves.
        num_losses: number of independent loss scalers.
        accumulation: how many backward passes make a step.
        clip: limits the gradients before a step.
        restore_buffers: restore batch-norm statistics when a step is skipped.
        check_ranks: compare ranks every so many steps; None for never.

    Raises:
        ConfigError: ``num_losses`` or ``check_ranks`` is not a positive integer.
    """

    properties: Properties = field(default_factory=Properties)
    policy: Policy = field(default_factory=Policy)
    scale: ScaleConfig = field(default_factory=ScaleConfig.static)
    num_losses: int = 1
    accumulation: Accumulation = field(default_factory=Accumulation)
    clip: Clip = field(default_factory=NoClip)
    restore_buffers: bool = True
    check_ranks: int | None = None

    def __post_init__(self) -> None:
        if type(self.num_losses) is not int or not 1 <= self.num_losses <= 2**16:
            raise ConfigError(
                f"num_losses={short_repr(self.num_losses)} must be an integer from 1 to 65536; write num_losses=1"
            )
        if self.check_ranks is not None and (type(self.check_ranks) is not int or self.check_ranks < 1):
            raise ConfigError(
                f"check_ranks={short_repr(self.check_ranks)} must be a positive number of steps, or None; write "
                "check_ranks=1000"
            )
