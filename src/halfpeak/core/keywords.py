"""Refuses unknown keyword arguments with a typed error that suggests a similar one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

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
        own = [name for name in inspect.signature(function).parameters if name != "self"]
        is_constructor = function.__name__ == "__init__"

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for given in kwargs:
                if given not in own:
                    name = type(args[0]).__name__ if is_constructor else function.__qualname__
                    known = _keywords_of(type(args[0]), checked) if is_constructor else own
                    near = similar(given, known)
                    hint = f"did you mean {near[0]!r}?" if near else f"write one of {', '.join(known)}"
                    hint = f"write {elsewhere[given]}" if given in elsewhere else hint
                    raise ConfigTypeError(f"{name} has no keyword {given!r}; {hint}")
            return function(*args, **kwargs)

        return checked

    return decorate


def _keywords_of(cls: type, base: Callable[..., Any]) -> list[str]:
    """The keywords that a class takes whose constructor calls ``base``, that of one of its base classes."""
    found: dict[str, None] = {}
    for constructor in (vars(one)["__init__"] for one in cls.__mro__ if "__init__" in vars(one)):
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        found |= dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        if constructor is base:
            break
    return list(found)


def known_fields(cls: C) -> C:
    """:func:`known_keywords` for a dataclass."""
    cls.__init__ = known_keywords()(cls.__init__)
    return cls
