"""The functions of the installed torch behind the names in :mod:`halfpeak.casting.oplists`, and the reverse."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, Final

import torch
from torch.overrides import get_testing_overrides, resolve_name

from halfpeak.casting.oplists import COMPOSITE, Rows


def functions(rows: Rows) -> list[Any]:
    """The functions that ``rows`` name, without those that this torch lacks.

    >>> functions((("torch", "mm no_such_name"), ("torch.Tensor", "data.__get__")))
    [<built-in method mm ...>, <method-wrapper '__get__' ...>]
    """
    found = [function_at(f"{path}.{name}") for path, names in rows for name in names.split()]
    return [function for function in found if function is not None]


def function_at(path: str) -> Any:
    """What ``path`` names, or None if this torch lacks it.

    >>> function_at("torch.Tensor.add_") is torch.Tensor.add_
    True
    """
    owner, names = ("torch.Tensor", path[13:]) if path.startswith("torch.Tensor.") else path.rsplit(".", 1)
    found: Any = torch.Tensor if owner == "torch.Tensor" else importlib.import_module(owner)
    for name in names.split("."):
        found = getattr(found, name, None)
    return found


def dispatched_path(function: Any) -> str | None:
    """The path under which torch dispatches ``function`` to function modes, or None if it does not.

    >>> dispatched_path(torch.nn.functional.linear)
    'torch.nn.functional.linear'
    >>> dispatched_path(len) is None
    True
    """
    known = isinstance(function, Hashable) and function in get_testing_overrides()
    return resolve_name(function) if known else None


def without_dispatch(func: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of ``func`` that does not dispatch itself, while the calls in its body still do.

    A function of torch that is written in Python begins with ``if has_torch_function(...): return
    handle_torch_function(...)``. The copy has its module's globals with a ``has_torch_function`` that returns False, so its
    body runs although a function mode is on.
    """
    assert isinstance(func, FunctionType)
    names: dict[str, Any] = dict(func.__globals__)
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        names[name] = _return_false
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _return_false(*_: object) -> bool:
    return False


COMPOSITE_BODIES: Final = {func.__qualname__: without_dispatch(func) for func in functions(COMPOSITE)}
"""Copies of the listed functions that do not dispatch themselves, by name, because :func:`torch.compile` can trace that."""
