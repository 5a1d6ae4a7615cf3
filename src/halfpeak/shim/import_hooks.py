"""Callbacks on imports by other code: after a module's import, and on access to a missing attribute of a package."""

from __future__ import annotations

from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from halfpeak.shim.spec import Undo


class AfterImport(Loader):
    """Runs the real loader, which the module keeps as its loader, and then calls ``action``."""

    def __init__(self, real: Any, action: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._action = action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module with the real loader."""
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the real loader, after making it the module's loader, and then the action."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        self._action(module)


def add_lazy_submodules(
    package: ModuleType, find: Callable[[str], Any], refusal: Callable[[str], str]
) -> Undo:
    """Make ``package.name`` import a submodule or name on access.

    Args:
        package: any module; its own ``__getattr__``, if it has one, is asked for all other names.
        find: returns the object with a full name, or None if it does not know the name.
        refusal: returns the message for a full name that is not provided; empty for Python's own message.

    Returns:
        A function that restores the package's own ``__getattr__``, or its absence.
    """
    before: Any = vars(package).get("__getattr__")

    def get(name: str) -> Any:
        fullname = f"{package.__name__}.{name}"
        found = None if name.startswith("__") else find(fullname)
        if found is not None:
            return found
        if before is not None:
            return before(name)
        message = refusal(fullname) or f"module {package.__name__!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=package)

    def undo() -> None:
        if vars(package).get("__getattr__") is get:
            del vars(package)["__getattr__"]
            if before is not None:
                vars(package)["__getattr__"] = before

    vars(package)["__getattr__"] = get
    return undo
