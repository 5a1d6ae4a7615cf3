"""The error for a missing optional package: one sentence that says what to install, instead of a traceback."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from halfpeak.core.errors import HalfpeakError

_DISTRIBUTIONS: Final = {"sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Of packages that are installed by another name than they are imported by."""


class MissingExtraError(HalfpeakError, ImportError):
    """An optional package is not installed. The message names it and the command that installs it."""


@contextmanager
def needs_extra() -> Generator[None]:
    """Turn the failed import of an optional package into a :class:`MissingExtraError`.

    >>> with needs_extra():
    ...     import no_such_package
    Traceback (most recent call last):
    ...
    halfpeak.core.extras.MissingExtraError: no_such_package is not installed; write pip install no_such_package
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        raise MissingExtraError(
            f"{package} is not installed; write pip install {_DISTRIBUTIONS.get(package, package)}"
        ) from None
