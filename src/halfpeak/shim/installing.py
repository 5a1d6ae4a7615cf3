"""``install`` and ``uninstall``, and what they can install. Only ``sys.meta_path`` says that a shim is installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from halfpeak.core.errors import ConfigError
from halfpeak.shim.apex import APEX
from halfpeak.shim.finder import Finder
from halfpeak.shim.mmcv import MMCV
from halfpeak.shim.mmengine import MMENGINE
from halfpeak.shim.spec import Shim

SHIMS: Final[Mapping[str, Shim]] = MappingProxyType({"apex": APEX, "mmcv": MMCV, "mmengine": MMENGINE})
"""Argument of ``install`` -> what it installs."""


def install(name: str = "apex") -> None:
    """Make old imports work in this process, until :func:`uninstall`. A second call does nothing.

    Raises:
        ConfigError: there is no shim of this name.
    """
    _require_known(name)
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
    if name is not None:
        _require_known(name)
    for finder in _finders():
        if name in (None, finder.name):
            finder.stop()


def installed() -> tuple[str, ...]:
    """The names that are installed now, the latest first."""
    return tuple(finder.name for finder in _finders())


def _require_known(name: str) -> None:
    if name not in SHIMS:
        raise ConfigError(f"there is no shim {name!r}; write one of {', '.join(map(repr, SHIMS))}")


def _finders() -> list[Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, Finder)]
