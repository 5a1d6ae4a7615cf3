"""Functions that the user registers or decorates to run low, in float32, or promoted."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, Final, Literal, ParamSpec, TypeVar

import torch

from halfpeak.casting.scope import find_rule
from halfpeak.casting.torch_functions import dispatched_path
from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr

P = ParamSpec("P")
R = TypeVar("R")

Place = tuple[Any, str]
"""A module or class, and the name of a function in it."""

CastRule = Literal["low", "float32", "promote"]
"""How the floating arguments of a function are cast: to the low dtype, weights through the cache; to float32; or low ones to
float32 where low and float32 meet."""


def by_dispatch(registered: Mapping[Place, CastRule]) -> tuple[dict[str, str], dict[Place, str]]:
    """Two dicts: the rules of torch functions, by the path under which torch dispatches them, and of all others, by place.

    A torch function gets the rule in place of its built-in one, however it is reached. Any other function is replaced
    in its module while a scope of these casts is open, so code that fetched it before is not affected.

    >>> import torch
    >>> by_dispatch({(torch, "sigmoid"): "float32"})
    ({'torch.sigmoid': 'float32'}, {})

    Raises:
        ConfigError: a place has no function.
    """
    changes: dict[str, str] = {}
    places: dict[Place, str] = {}
    for (module, name), rule in registered.items():
        paths = dispatched_paths(module, name)
        changes.update(dict.fromkeys(paths, rule))
        if not paths:
            places[module, name] = rule
    return changes, places


def dispatched_paths(module: Any, name: str) -> list[str]:
    """The paths under which torch dispatches a call of this function; none if it is not a torch function.

    Raises:
        ConfigError: ``module`` has no such function.
    """
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"no function {short_repr(name)} in {_spell(module)}; register one that exists")
    functions: list[Any] = [function]
    if module is torch.Tensor and name.startswith("__"):  # `x @ y` is dispatched as Tensor.matmul
        functions.append(getattr(module, name.strip("_"), None))
    return [path for path in map(dispatched_path, functions) if path is not None]


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
