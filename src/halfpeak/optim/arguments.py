"""Argument checks that wrappers, hooks and runners share."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr

T = TypeVar("T")


def require_flag(name: str, value: object) -> bool:
    """Return ``value``, which must be a bool.

    Raises:
        ConfigTypeError: anything else.
    """
    if not isinstance(value, bool):
        raise ConfigTypeError(f"{name}={short_repr(value)} must be True or False")
    return value


def require_count(name: str, value: object, least: int = 1, hint: str = "") -> int:
    """Return an integer (NumPy's too) of ``least`` or more; ``hint`` ends the message: ``"; write interval=50"``.

    Raises:
        ConfigError: anything else.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise ConfigError(f"{name}={short_repr(value)} must be an integer of {least} or more{hint}")
    return number


def require_number(name: str, value: Any) -> float:
    """Return ``value``, which must be a finite number.

    Raises:
        ConfigTypeError: anything else.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise ConfigTypeError(f"{name}={short_repr(value)} must be a finite number; write {name}=0.1")
    return value


def require_choice(name: str, value: T, choices: Iterable[str]) -> T:
    """Return ``value``, which must be one of several names.

    Raises:
        ConfigError: anything else.
    """
    choices = list(choices)
    if value not in choices:
        raise ConfigError(f"{name}={short_repr(value)} must be one of {', '.join(map(repr, choices))}")
    return value


def require_dict(name: str, value: object, example: str) -> Mapping[str, Any]:
    """Return ``value``, which must be a dict; the message shows ``example``.

    Raises:
        ConfigTypeError: anything else.
    """
    if not isinstance(value, Mapping):
        raise ConfigTypeError(f"{name} must be a dict, not {type(value).__name__}; write {example}")
    return value
