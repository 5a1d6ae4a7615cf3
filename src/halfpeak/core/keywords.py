"""Refuses unknown keyword arguments with a typed error that suggests a similar one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from halfpeak.core.errors import ConfigTypeError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def known_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Raise :class:`~halfpeak.ConfigTypeError` where Python would raise a bare TypeError for an unknown keyword.

    >>> @known_keywords
    ... def train(*, level="O2", accumulate=1):
    ...     return accumulate
    >>> train(acumulate=2)
    Traceback (most recent call last):
    ...
    halfpeak.core.errors.ConfigTypeError: train has no keyword 'acumulate'; did you mean 'accumulate'?
    """
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    name = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [given for given in kwargs if given not in known]
        if unknown:
            near = difflib.get_close_matches(unknown[0], known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"write one of {', '.join(known)}"
            raise ConfigTypeError(f"{name} has no keyword {unknown[0]!r}; {hint}")
        return function(*args, **kwargs)

    return checked


def known_fields(cls: C) -> C:
    """:func:`known_keywords` for a dataclass."""
    cls.__init__ = known_keywords(cls.__init__)
    return cls
