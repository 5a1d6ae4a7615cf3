"""Callbacks on imports by other code: after a module's import, and on access to a missing attribute of a package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from halfpeak.shim.spec import Undo

Action = Callable[[ModuleType], Undo]


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


def when_imported(name: str, action: Action) -> Undo:
    """Call ``action`` with a module: now if it is already imported, else right after its import.

    Returns:
        A function that stops waiting for the import and reverts what ``action`` has done.
    """
    watch = _Watch(name, action)
    watch.start()
    return watch.stop


class _Watch(MetaPathFinder):
    """A finder that waits for the import of one module, and lets the other finders find it."""

    def __init__(self, name: str, action: Action) -> None:
        self._name = name
        self._action = action
        self._undos: list[Undo] = []
        self._is_asking = False

    def start(self) -> None:
        module = sys.modules.get(self._name)
        if module is None or getattr(module.__spec__, "_initializing", False):
            sys.meta_path.insert(0, self)
        if module is not None and self not in sys.meta_path:
            self._act(module)

    def stop(self) -> None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        while self._undos:
            self._undos.pop()()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # A shim's finder asks all finders, including this one, so the call below may recurse.
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            found = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = AfterImport(spec.loader, self._act)
        return spec

    def _act(self, module: ModuleType) -> None:
        self._undos.append(self._action(module))


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
