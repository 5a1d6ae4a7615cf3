"""Functions that the user registers or decorates to run low, in float32, or promoted."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, ParamSpec, TypeVar

import torch

from halfpeak.casting.scope import find_rule
from halfpeak.casting.torch_functions import dispatched_path
from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr

P = ParamSpec("P")
R = TypeVar("R")

Place = tuple[Any, str]
"""A module or class, and the name of a function in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registrations:
    """Functions by place, and how their floating arguments are cast.

    A torch function gets the rule in place of its built-in one, however it is reached. Any other function is replaced
    in its module while a scope of these casts is open, so code that fetched it before is not affected.

    Attributes:
        low: cast to the low dtype, weights through the cache.
        float32: cast to float32.
        promote: cast low ones to float32 where low and float32 meet.

    >>> import torch
    >>> Registrations(float32=((torch, "sigmoid"),)).changes()
    {'torch.sigmoid': 'float32'}
    """

    low: tuple[Place, ...] = ()
    float32: tuple[Place, ...] = ()
    promote: tuple[Place, ...] = ()

    def __post_init__(self) -> None:
        seen: dict[Place, str] = {}
        for kind, module, name in self._rows():
            if not callable(getattr(module, name, None)):
                raise ConfigError(
                    f"no function {short_repr(name)} in {_spell(module)}; register one that exists"
                )
            other = seen.setdefault((module, name), kind)
            if other != kind:
                raise ConfigError(
                    f"{_spell(module)}.{name} is registered as {other} and as {kind}; choose one"
                )

    def changes(self) -> dict[str, str]:
        """The rules of torch functions, by the path under which torch dispatches them."""
        return {path: kind for kind, module, name in self._rows() for path in _dispatched_paths(module, name)}

    def places(self) -> dict[Place, str]:
        """The rules of all other functions, by place."""
        return {
            (module, name): kind for kind, module, name in self._rows() if not _dispatched_paths(module, name)
        }

    def _rows(self) -> Iterator[tuple[str, Any, str]]:
        for kind, places in (("low", self.low), ("float32", self.float32), ("promote", self.promote)):
            for module, name in places:
                yield kind, module, name


def _spell(module: Any) -> str:
    return getattr(module, "__name__", None) or repr(module)


def low_function(function: Callable[P, R]) -> Callable[P, R]:
    """Cast the function's floating arguments to the low dtype, if casts are active when it is called."""
    return _by_scope(function, "low")


def float_function(function: Callable[P, R]) -> Callable[P, R]:
    """Cast the function's floating arguments to float32, if casts are active when it is called."""
    return _by_scope(function, "float32")


def promote_function(function: Callable[P, R]) -> Callable[P, R]:
    """Cast low arguments to float32 where low and float32 meet, if casts are active when it is called."""
    return _by_scope(function, "promote")


def _by_scope(function: Callable[P, R], key: Any) -> Callable[P, R]:
    @functools.wraps(function, updated=())
    def collect(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        found = find_rule(key)
        if found is not None:
            scope, rule = found
            with scope.without_casts():
                args, kwargs = rule(scope, collect, args, kwargs)
        return function(*args, **kwargs)

    return wrapper


def _dispatched_paths(module: Any, name: str) -> list[str]:
    """The paths under which torch dispatches a call of this function; none if it is not a torch function."""
    functions = [getattr(module, name)]
    if module is torch.Tensor and name.startswith("__"):  # `x @ y` is dispatched as Tensor.matmul
        functions.append(getattr(module, name.strip("_"), None))
    return [path for path in map(dispatched_path, functions) if path is not None]


class _Replacement:
    """An attribute in which a wrapper replaces the user's function, with the number of scopes that need it."""

    def __init__(self, module: Any, name: str) -> None:
        function: Any = getattr(module, name)
        wrapper: Any = _by_scope(function, (module, name))
        self.original: Any = vars(module).get(name, _INHERITED)
        if isinstance(module, type) and not isinstance(self.original, FunctionType):
            wrapper = staticmethod(wrapper)  # what getattr returned is bound already, or a plain callable
        self.count = 0
        self.wrapper = wrapper
        setattr(module, name, wrapper)

    def undo(self, module: Any, name: str) -> None:
        if vars(module).get(name) is not self.wrapper:
            return  # replaced by other code since: leave that
        if self.original is _INHERITED:
            delattr(module, name)
        else:
            setattr(module, name, self.original)


_INHERITED: Final = object()
_replacements: Final[dict[Place, _Replacement]] = {}
_lock: Final = threading.Lock()


def replace(places: Iterable[Place]) -> None:
    """Replace the functions in ``places`` by wrappers that cast by the active scope. Counted, so scopes may overlap.

    Raises:
        ConfigError: an owner does not let its attributes be set. No place has changed then.
    """
    done: list[Place] = []
    for module, name in places:
        try:
            _replace_one(module, name)
        except (AttributeError, TypeError) as error:
            restore(done)
            raise ConfigError(f"{_spell(module)}.{name} cannot be replaced: {error}") from error
        done.append((module, name))


def restore(places: Iterable[Place]) -> None:
    """Undo one :func:`replace`; the last one restores the original functions."""
    with _lock:
        for module, name in reversed(list(places)):
            _replacements[module, name].count -= 1
            if _replacements[module, name].count == 0:
                _replacements.pop((module, name)).undo(module, name)


def _replace_one(module: Any, name: str) -> None:
    with _lock:
        if (module, name) not in _replacements:
            _replacements[module, name] = _Replacement(module, name)
        _replacements[module, name].count += 1
