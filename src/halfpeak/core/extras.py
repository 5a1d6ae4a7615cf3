"""The error for missing optional packages: one sentence that says what to install, instead of a traceback."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final

from halfpeak.core.errors import HalfpeakError

_DISTRIBUTIONS: Final = {"sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Of packages that are installed by another name than they are imported by."""


class MissingExtraError(HalfpeakError, ImportError):
    """Optional packages are not installed. The message names them and the command that installs them."""


@contextmanager
def needs_extra(*others: str) -> Generator[None]:
    """Turn the failed import of an optional package into a :class:`MissingExtraError`.

    Args:
        others: packages that the same work will import later. The error also names those of them that are missing, so that
            all can be installed at once.

    >>> with needs_extra("torch", "no_such_neighbour"):
    ...     import no_such_package
    Traceback (most recent call last):
    ...
    halfpeak.core.extras.MissingExtraError: no_such_package and no_such_neighbour are not installed; write pip install
    no_such_package no_such_neighbour, or pip install '.[all]' in a clone of halfpeak
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        missing = [package, *(one for one in others if one != package and find_spec(one) is None)]
        *first, last = names = [_DISTRIBUTIONS.get(one, one) for one in missing]
        listed, clone = f"{last} is", ""
        if first:
            listed, clone = (
                f"{', '.join(first)} and {last} are",
                ", or pip install '.[all]' in a clone of halfpeak",
            )
        raise MissingExtraError(
            f"{listed} not installed; write pip install {' '.join(names)}{clone}"
        ) from None
