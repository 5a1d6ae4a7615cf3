"""Taking names in a registry of mmengine or mmcv, and giving them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfpeak.shim.description import Undo

Entry = tuple[Any, str, type]
"""A registry, a name, and the class that it shall mean."""


def put(entries: Sequence[Entry]) -> Undo:
    """Let each name mean our class.

    Returns:
        What puts back who had it before. A name that somebody else has taken since stays theirs.
    """
    before = [registry.module_dict.get(name) for registry, name, _ in entries]
    for registry, name, cls in entries:
        registry.register_module(name=name, module=cls, force=True)

    def undo() -> None:
        for (registry, name, cls), original in zip(entries, before, strict=True):
            if registry.module_dict.get(name) is not cls:
                continue
            if original is None:
                del registry.module_dict[name]
            else:
                registry.module_dict[name] = original

    return undo
