"""Torch functions written in Python, in a form whose inner calls are announced while the outer one is being handled."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

from halfpeak.casting.oplists import COMPOSITE
from halfpeak.casting.resolve import functions


def open_up(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` without its opening question whether someone wants to handle the call.

    Such a function begins with ``if has_torch_function(...): return handle_torch_function(...)``. To run the rest of it
    while a function mode is on, it is given a copy of its module's globals in which the answer is no. The calls it
    makes ask for themselves and get the true answer.
    """
    assert isinstance(func, FunctionType)
    names: dict[str, Any] = dict(func.__globals__)
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        names[name] = _answer_no
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _answer_no(*_: object) -> bool:
    return False


BODIES: Final = {func.__qualname__: open_up(func) for func in functions(COMPOSITE)}
"""The listed functions, opened up, by name. (By name, because :func:`torch.compile` can trace that.)"""
