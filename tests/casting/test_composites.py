"""No function that reaches ``__torch_function__`` as one call hides inner calls to which a rule applies."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import get_testing_overrides

from casting.opcalls import named
from halfpeak.casting import oplists
from halfpeak.casting.rule_table import listed_rules
from halfpeak.casting.torch_functions import COMPOSITE_BODIES

SAME_NAME_ONLY = {"sym_sum", "unravel_index", "__deepcopy__"}
"""Functions that use only the name of a listed function: for sums of symbols, strides, the attribute ``grad``."""


def names_in(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*(names_in(one) for one in inner))


@functools.cache
def listed_names() -> set[str]:
    return {
        function.__name__
        for function, rule in listed_rules().items()
        if rule not in ("upcast", "expose_memory", "uncounted_write", "call_as_function")
    }


def reaches(function: types.FunctionType, seen: set[types.FunctionType]) -> bool:
    """Whether the function calls a listed function, directly or through other Python functions of torch."""
    if function in seen:
        return False
    seen.add(function)
    for name in names_in(function.__code__):
        if name in listed_names():
            return True
        for place in (function.__globals__, vars(torch), vars(F), vars(torch.Tensor)):
            inner = place.get(name)
            own = isinstance(inner, types.FunctionType) and inner.__module__.startswith("torch.")
            if own and name != "handle_torch_function" and reaches(inner, seen):
                return True
    return False


def python_functions() -> list[types.FunctionType]:
    announced: list[Any] = [*get_testing_overrides(), torch.autograd.backward, torch.autograd.grad]
    return [
        one
        for one in announced
        if isinstance(one, types.FunctionType) and "distributed" not in one.__module__
    ]


def test_no_announced_python_function_hides_listed_calls() -> None:
    ruled = {*listed_rules(), *(function for _, function in named(oplists.LEFT_ALONE))}
    hiding = [
        function.__qualname__
        for function in python_functions()
        if function not in ruled and function.__name__ not in SAME_NAME_ONLY and reaches(function, set())
    ]
    assert hiding == []


def test_the_search_finds_what_is_there() -> None:
    assert len(python_functions()) > 100
    assert all(reaches(function, set()) for _, function in named(oplists.COMPOSITE))
    assert not reaches(F.dropout, set())


def test_every_listed_composite_asks_the_question_that_is_answered_for_it() -> None:
    for path, function in named(oplists.COMPOSITE):
        assert inspect.isfunction(function), path
        assert COMPOSITE_BODIES[function.__qualname__].__code__ is function.__code__
        asked = {name for name in names_in(function.__code__) if name.startswith("has_torch_function")}
        answered = {
            name for name in asked if COMPOSITE_BODIES[function.__qualname__].__globals__[name]() is False
        }
        assert asked == answered
