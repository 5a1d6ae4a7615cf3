"""One tree of exceptions, drawn in its docstring. Each is also a builtin error, which old ``except`` clauses catch."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from halfpeak.core import errors

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and value.__module__ == errors.__name__ and value is not errors.HalfpeakError
]


@pytest.mark.parametrize("cls", CLASSES)
def test_is_a_halfpeak_error_and_a_builtin_one(cls: type[Exception]) -> None:
    assert issubclass(cls, errors.HalfpeakError)
    builtin = [base for base in cls.__mro__ if base.__module__ == "builtins"]
    assert set(builtin) - {Exception, BaseException, object}


@pytest.mark.parametrize("cls", CLASSES)
def test_crosses_a_process_boundary(cls: type[Exception]) -> None:
    error = cls("the value, the allowed ones, what to write")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_drawing_shows_its_builtins(cls: type[Exception]) -> None:
    drawn = re.search(rf"── {cls.__name__}(?: \(([\w, ]+)\))?(?:\s|$)", errors.__doc__ or "")
    assert drawn, f"{cls.__name__} is not in the drawing"
    own = [base.__name__ for base in cls.__bases__ if base.__module__ == "builtins"]
    assert (drawn[1].split(", ") if drawn[1] else []) == own
