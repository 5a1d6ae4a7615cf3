"""A package whose modules are imported when they are first asked for, be it real with some missing, or from a shim."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from halfpeak.shim.description import Shim


class AfterImport(Loader):
    """A loader that does what the real one does, gives the module back to it, and then tells somebody."""

    def __init__(self, real: Any, tell: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._tell = tell

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
        self._tell(module)


class Completion:
    """``package.name`` imports a module that the shim has, as though ``package`` had imported it already."""

    def __init__(self, package: ModuleType, shim: Shim) -> None:
        self._package = package
        self._shim = shim
        self._before: Any = vars(package).get("__getattr__")
        vars(package)["__getattr__"] = self._get

    def _get(self, name: str) -> Any:
        fullname = f"{self._package.__name__}.{name}"
        if not name.startswith("__") and self._shim.file_of(fullname) is not None:
            return importlib.import_module(fullname)
        if self._before is not None:
            return self._before(name)
        known = self._shim.made(self._package) or self._shim.advice(fullname)
        message = (
            self._shim.refusal(fullname)
            if known
            else f"module {self._package.__name__!r} has no attribute {name!r}"
        )
        raise AttributeError(message, name=name, obj=self._package)

    def undo(self) -> None:
        """Give the package its own ``__getattr__``, or none, again."""
        if vars(self._package).get("__getattr__") == self._get:
            del vars(self._package)["__getattr__"]
            if self._before is not None:
                vars(self._package)["__getattr__"] = self._before
