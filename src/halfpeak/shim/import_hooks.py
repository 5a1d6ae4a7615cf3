"""Code that runs around other people's imports: after a module's import, and when a missing attribute is asked for."""

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
    """Runs another loader, leaves the module with that loader as its own, and then calls ``action``."""

    def __init__(self, real: Any, action: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._action = action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the real loader."""
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the real loader, which the module then names as its own."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        self._action(module)


def when_imported(name: str, action: Action) -> Undo:
    """Call ``action`` with the module of that name: now if it is imported already, else right after its import.

    Returns:
        What stops the waiting, and takes back what ``action`` has done.
    """
    watch = _Watch(name, action)
    watch.start()
    return watch.stop


class _Watch(MetaPathFinder):
    """Stands in ``sys.meta_path`` until one module is imported, and lets the other finders find it."""

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
        # The shims' finders ask all finders too, and this one among them.
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
    """Let ``package.name`` import a submodule or a name, as though the package had imported it already.

    Args:
        package: any module; a ``__getattr__`` of its own is asked for all other names.
        find: what a full name means; None for all that it does not know.
        refusal: the message for a full name that is not provided; empty where Python's own will do.

    Returns:
        What gives the package its own ``__getattr__``, or none, again.
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
