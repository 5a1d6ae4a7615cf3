"""Replacing classes in registries of mmengine or mmcv, and restoring the former classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfpeak.shim.spec import Undo


def put(entries: Sequence[tuple[Any, str, type]]) -> Undo:
    """Register each class in place of the class that has its name.

    Args:
        entries: of each class its registry, its name and the class.

    Returns:
        A function that restores the former classes. A name that was registered again in the meantime stays.
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
