"""delegated: a property of a wrapper that reads and writes an attribute of the wrapped object."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


def delegated(path: str) -> Any:
    """Return a property that reads and writes the dotted ``path``, which begins at the object itself.

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
