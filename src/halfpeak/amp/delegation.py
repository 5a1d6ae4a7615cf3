"""delegated: an attribute of a wrapper that is an attribute of what it wraps."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


def delegated(path: str) -> Any:
    """A property that is read and set at ``path``, from the object on.

    >>> class Wrapper:
    ...     lr = delegated("inside.lr")
    >>> from types import SimpleNamespace
    >>> wrapper = Wrapper()
    >>> wrapper.inside = SimpleNamespace(lr=0.1)
    >>> wrapper.lr = 0.2
    >>> wrapper.lr, wrapper.inside
    (0.2, namespace(lr=0.2))
    """
    owner, _, name = path.rpartition(".")
    owner_of = attrgetter(owner)

    def write(self: object, value: object) -> None:
        setattr(owner_of(self), name, value)

    return property(attrgetter(path), write)
