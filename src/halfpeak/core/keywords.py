"""Refuses unknown keyword arguments with a typed error that suggests a similar one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from halfpeak.core.errors import ConfigTypeError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def similar(name: str, known: Sequence[str]) -> list[str]:
    """The known names of the same words in another order; else those with similar letters, the most similar first.

    >>> similar("grad_clip", ["clip_grad", "sink"]), similar("snik", ["clip_grad", "sink"])
    (['clip_grad'], ['sink'])
    """
    words = sorted(name.split("_"))
    return [one for one in known if sorted(one.split("_")) == words] or difflib.get_close_matches(name, known)


def known_keywords(
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: raise :class:`~halfpeak.ConfigTypeError` where Python would raise a bare TypeError for an unknown keyword.

    Args:
        elsewhere: keywords that belong to another call, each with what to write.

    >>> @known_keywords()
    ... def train(*, level="O2", accumulate=1):
    ...     return accumulate
    >>> train(acumulate=2)
    Traceback (most recent call last):
    ...
    halfpeak.core.errors.ConfigTypeError: train has no keyword 'acumulate'; did you mean 'accumulate'?
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]
        name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for given in kwargs:
                if given not in known:
                    near = similar(given, known)
                    hint = f"did you mean {near[0]!r}?" if near else f"write one of {', '.join(known)}"
                    hint = f"write {elsewhere[given]}" if given in elsewhere else hint
                    raise ConfigTypeError(f"{name} has no keyword {given!r}; {hint}")
            return function(*args, **kwargs)

        return checked

    return decorate


def known_fields(cls: C) -> C:
    """:func:`known_keywords` for a dataclass."""
    cls.__init__ = known_keywords()(cls.__init__)
    return cls
