"""Refuses unknown keyword arguments, and keys of configurations, with a typed error that suggests a similar one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import Parameter
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from halfpeak.core.errors import ConfigTypeError
from halfpeak.core.short_repr import short_repr

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

Factory = Callable[..., Any]
"""A class or function that builds something out of keyword arguments."""


def similar(name: str, known: Sequence[str]) -> list[str]:
    """The known names of the same words in another order; else those with similar letters, the most similar first.

    >>> similar("grad_clip", ["clip_grad", "sink"]), similar("snik", ["clip_grad", "sink"])
    (['clip_grad'], ['sink'])
    """
    words = sorted(name.split("_"))
    return [one for one in known if sorted(one.split("_")) == words] or difflib.get_close_matches(name, known)


class Keywords(NamedTuple):
    """The keyword arguments of a factory, in order, and whether it takes any others (``**kwargs``)."""

    names: tuple[str, ...]
    is_open: bool


def keywords_of(factory: Factory) -> Keywords:
    """Read a factory's signature; ConfigTypeError if it has none.

    >>> keywords_of(lambda params, lr=0.1, **options: None)
    Keywords(names=('params', 'lr'), is_open=True)
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        raise ConfigTypeError(
            f"{name_of(factory)} has no signature that can be read; wrap it in a function with named arguments"
        ) from None
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return Keywords(
        names=tuple(parameter.name for parameter in parameters if parameter.kind in by_name),
        is_open=any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters),
    )


def name_of(factory: Factory) -> str:
    """The name of a factory in messages."""
    return getattr(factory, "__name__", repr(factory))


def unknown_key(owner: str, key: object, allowed: Iterable[str]) -> str:
    """Return a message about a wrong key: similar keys, then all allowed keys."""
    allowed = list(allowed)
    near = did_you_mean(key, allowed) if isinstance(key, str) else ""
    return f"{owner} takes no {short_repr(key)}; {near}It takes {', '.join(allowed) or 'nothing'}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ``did you mean ...? `` with similar names, or "". Ignores case and any prefix that ends in a dot."""
    folded = {known.lower(): known for known in names}
    near = similar(name.rpartition(".")[2].lower(), list(folded))
    return f"did you mean {' or '.join(repr(folded[one]) for one in near)}? " if near else ""


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
    halfpeak.core.errors.ConfigTypeError: train takes no 'acumulate'; did you mean 'accumulate'? It takes level, accumulate
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
                    if given in elsewhere:
                        raise ConfigTypeError(f"{name} takes no {given!r}; write {elsewhere[given]}")
                    raise ConfigTypeError(unknown_key(name, given, known))
            return function(*args, **kwargs)

        return checked

    return decorate


def _keywords_of(cls: type, base: Callable[..., Any]) -> list[str]:
    """The keywords that a class takes whose constructor calls ``base``, that of one of its base classes."""
    found: dict[str, None] = {}
    for constructor in (vars(one)["__init__"] for one in cls.__mro__ if "__init__" in vars(one)):
        found |= dict.fromkeys(keywords_of(constructor).names[1:])
        if constructor is base:
            break
    return list(found)


def known_fields(cls: C) -> C:
    """:func:`known_keywords` for a dataclass."""
    cls.__init__ = known_keywords()(cls.__init__)
    return cls
