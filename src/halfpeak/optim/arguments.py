"""Argument checks that wrappers, hooks and runners share."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import is_number

T = TypeVar("T")


def require_flag(name: str, value: object) -> bool:
    """Return ``value``; ConfigTypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise ConfigTypeError(f"{name}={short_repr(value)} must be True or False")
    return value


def require_count(name: str, value: object, least: int = 1, hint: str = "") -> int:
    """Return an integer (NumPy's too) of ``least`` or more; ConfigError for anything else.

    ``hint`` ends the message: ``"; write interval=50"``.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise ConfigError(f"{name}={short_repr(value)} must be an integer of {least} or more{hint}")
    return number


def require_number(name: str, value: Any) -> float:
    """Return ``value``; ConfigTypeError unless it is a finite number."""
    if not is_number(value) or not abs(value) <= sys.float_info.max:
        raise ConfigTypeError(f"{name}={short_repr(value)} must be a finite number; write {name}=0.1")
    return value


def require_choice(name: str, value: T, choices: Iterable[str]) -> T:
    """Return ``value``; ConfigError unless it is one of several names."""
    choices = list(choices)
    if value not in choices:
        raise ConfigError(f"{name}={short_repr(value)} must be one of {', '.join(map(repr, choices))}")
    return value


def require_dict(name: str, value: object, example: str, kinds: str = "a dict") -> Mapping[str, Any]:
    """Return ``value``; ConfigTypeError, with an example in the message, unless it is a dict."""
    if not isinstance(value, Mapping):
        raise ConfigTypeError(f"{name} must be {kinds}, not {type(value).__name__}; write {example}")
    return value
