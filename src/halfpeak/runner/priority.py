"""Priority: which hook is called before which. Answers to mmcv 1.7.2."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from halfpeak.core.errors import ConfigError, ConfigTypeError


class PriorityNameError(ConfigError, KeyError):
    """A priority with an unknown name."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would show the message quoted


class Priority(IntEnum):
    """The named priorities. A smaller number is called earlier; any number from 0 to 100 may be used."""

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


_NAMES: Final = ", ".join(Priority.__members__)


def get_priority(priority: int | str | Priority) -> int:
    """The number of a priority.

    Raises:
        ConfigTypeError: neither a number nor a name.
        PriorityNameError: no such name.
        ConfigError: a number below 0 or above 100.

    >>> get_priority("very_high"), get_priority(Priority.LOW), get_priority(55)
    (10, 70, 55)
    """
    if isinstance(priority, bool) or not isinstance(priority, (int, str)):
        raise ConfigTypeError(
            f"priority={priority!r} must be a number from 0 to 100 or one of {_NAMES}; write priority='NORMAL'"
        )
    if isinstance(priority, str):
        if priority.upper() not in Priority.__members__:
            raise PriorityNameError(
                f"priority={priority!r} is unknown; write a number from 0 to 100 or one of {_NAMES}"
            )
        return Priority[priority.upper()].value
    if not 0 <= priority <= 100:
        raise ConfigError(f"priority={priority} must be from 0 to 100")
    return int(priority)
