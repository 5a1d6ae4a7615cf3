"""``install``, ``uninstall`` and the known shims. A shim is installed if its finder is in ``sys.meta_path``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

from halfpeak.core.errors import ConfigError
from halfpeak.shim.apex import APEX
from halfpeak.shim.finder import Finder
from halfpeak.shim.mmcv import MMCV
from halfpeak.shim.mmengine import MMENGINE
from halfpeak.shim.spec import Shim

SHIMS: Final[Mapping[str, Shim]] = {"apex": APEX, "mmcv": MMCV, "mmengine": MMENGINE}
"""Argument of ``install`` -> the shim that it installs."""


def install(name: str = "apex") -> None:
    """Make old imports work in this process, until :func:`uninstall`. A second call does nothing.

    Raises:
        ConfigError: there is no shim of this name.
    """
    _require_known(name)
    if name in installed():
        return
    finder = Finder(name, SHIMS[name])
    try:
        finder.start()
    except BaseException:
        finder.stop()
        raise


def uninstall(name: str | None = None) -> None:
    """Revert :func:`install` for one shim, or for all with ``name=None``. A shim that is not installed is ignored.

    The modules that imports loaded leave ``sys.modules``; objects from them keep working.

    Raises:
        ConfigError: there is no shim of this name.
    """
    if name is not None:
        _require_known(name)
    for finder in _finders():
        if name in (None, finder.name):
            finder.stop()


def installed() -> tuple[str, ...]:
    """The names of the installed shims, the latest first."""
    return tuple(finder.name for finder in _finders())


def _require_known(name: str) -> None:
    if name not in SHIMS:
        raise ConfigError(f"there is no shim {name!r}; write one of {', '.join(map(repr, SHIMS))}")


def _finders() -> list[Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, Finder)]
