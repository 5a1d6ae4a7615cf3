"""``install("mmengine")``: halfpeak's wrappers and their constructor in mmengine's registries, under mmengine's names."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from halfpeak.insight.extras import MissingExtraError
from halfpeak.shim.description import Undo
from halfpeak.shim.later import when_imported
from halfpeak.shim.mmengine_classes import make_constructor, make_wrappers
from halfpeak.shim.registries import Entry, put


def set_up() -> Undo:
    """Register as soon as ``mmengine.optim`` is imported.

    Raises:
        MissingExtraError: neither mmengine nor a fork of it is installed.
    """
    if find_spec("mmengine") is None:
        raise MissingExtraError(
            "mmengine is not installed; write pip install mmengine-lite, or use halfpeak.optim, which does not need it"
        )
    return when_imported("mmengine.optim", register)


def register(optim: ModuleType) -> Undo:
    """Put the classes into the registries in place of mmengine's own.

    Args:
        optim: the module ``mmengine.optim``.

    Returns:
        What puts mmengine's own back. A name that somebody else has taken since stays theirs.
    """
    registries: Any = import_module("mmengine.registry")
    wrappers = make_wrappers(optim)
    constructor = make_constructor(optim, wrappers, registries)
    entries: list[Entry] = [
        *((registries.OPTIM_WRAPPERS, name, cls) for name, cls in wrappers.items()),
        (registries.OPTIM_WRAPPER_CONSTRUCTORS, constructor.__name__, constructor),
    ]
    return put(entries)
