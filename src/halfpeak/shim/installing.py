"""``install`` and ``uninstall``. That a shim is installed is kept nowhere but in ``sys.meta_path``."""

from __future__ import annotations

import sys

from halfpeak.core.errors import ConfigError
from halfpeak.shim.finder import Finder
from halfpeak.shim.table import SHIMS


def install(name: str = "apex") -> None:
    """Make old imports work in this process, until :func:`uninstall`. A second call does nothing.

    Raises:
        ConfigError: there is no shim of this name.
    """
    if name not in SHIMS:
        raise ConfigError(f"there is no shim {name!r}; write one of {', '.join(map(repr, SHIMS))}")
    if name in installed():
        return
    finder = Finder(name, SHIMS[name])
    finder.start()
    try:
        finder.set_up()
    except BaseException:
        finder.stop()
        raise


def uninstall(name: str | None = None) -> None:
    """Take back what :func:`install` did: all of it, or what ``name`` brought. Does nothing where nothing is installed.

    Modules that the imports loaded leave ``sys.modules``; objects that came from them go on working.

    Raises:
        ConfigError: there is no shim of this name.
    """
    if name is not None and name not in SHIMS:
        raise ConfigError(f"there is no shim {name!r}; write one of {', '.join(map(repr, SHIMS))}")
    for finder in _finders():
        if name in (None, finder.name):
            finder.stop()


def installed() -> tuple[str, ...]:
    """The names that are installed now, the latest first."""
    return tuple(finder.name for finder in _finders())


def _finders() -> list[Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, Finder)]
