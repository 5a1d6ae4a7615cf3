"""Checks that the arguments of hooks share."""

from __future__ import annotations

import sys
from typing import Any

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr


def require_flag(name: str, value: object) -> bool:
    """A bool.

    Raises:
        ConfigTypeError: anything else.
    """
    if not isinstance(value, bool):
        raise ConfigTypeError(f"{name}={short_repr(value)} must be True or False")
    return value


def require_count(name: str, value: object, least: int = 1, hint: str = "") -> int:
    """An integer of ``least`` or more. ``hint`` ends the message, such as ``"; write interval=50"``.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={short_repr(value)} must be an integer of {least} or more{hint}")
    return value


def require_number(name: str, value: Any) -> float:
    """A finite number.

    Raises:
        ConfigTypeError: anything else.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise ConfigTypeError(f"{name}={short_repr(value)} must be a finite number; write {name}=0.1")
    return value
