"""Finder: the entry of ``sys.meta_path`` that provides a shim's modules. A real module of the same name wins."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

from halfpeak.shim.dist_metadata import ShimDistribution, add_to_working_set, normalized
from halfpeak.shim.import_hooks import AfterImport, add_lazy_submodules
from halfpeak.shim.spec import Shim, Undo


class Finder(MetaPathFinder):
    """The first entry of ``sys.meta_path``. It asks all other finders before it provides a module.

    If a package is missing, the finder builds it from the shim's table. If a real package is installed, the table adds
    the modules and names that the package lacks. A module is imported at its first use, also as an attribute of its
    package. After the import of a module that ``after_import`` names, the finder calls its function.
    """

    def __init__(self, name: str, shim: Shim) -> None:
        self.name = name
        self.shim = shim
        self._after_import = dict(shim.after_import)
        if shim.distribution:
            self._after_import["pkg_resources"] = partial(add_to_working_set, shim=shim)
        self._undo: list[Undo] = []
        self._is_asking = False

    def start(self) -> None:
        """Put the finder into ``sys.meta_path``, and run the shim's ``setup``; if this raises, call :meth:`stop`."""
        sys.meta_path.insert(0, self)
        for name in dict.fromkeys((*self.shim.modules, *self._after_import)):
            module = sys.modules.get(name)
            is_half = getattr(getattr(module, "__spec__", None), "_initializing", False)
            if module is not None and not (is_half and name in self._after_import):
                self._complete(module)
        if self.shim.setup is not None:
            self._undo.append(self.shim.setup())

    def stop(self) -> None:
        """Remove the finder, the modules that it made, its changes of packages, and import caches."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        for name in [name for name in sys.modules if self.shim.owns(name)]:
            if self._made(sys.modules[name]):
                self._forget(name)
        importlib.invalidate_caches()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module at or below one of the shim's packages, or of ``after_import``; None for any other module.

        Raises:
            ImportError: the shim provides no such module. ``importlib.util.find_spec`` gets None instead.
        """
        is_own = self.shim.owns(fullname)
        # Two finders may wait for one module, and ask each other for it.
        if not is_own and (self._is_asking or fullname not in self._after_import):
            return None
        found = self._ask_others(fullname, path, target)
        is_row = found is None and fullname in self.shim.modules
        spec = RowLoader(self.shim).spec(fullname) if is_row else found
        if spec is not None and (fullname in self.shim.modules or fullname in self._after_import):
            spec.loader = AfterImport(spec.loader, self._complete)
        if spec is not None or not is_own:
            return spec
        # A script that calls importlib.util.find_spec only asks whether the module exists, and can do without it.
        if sys._getframe(2).f_globals.get("__name__") != "importlib.util":
            message = self._refusal(fullname)
            if message:
                raise ImportError(message, name=fullname)
        return None

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        """The shim's distribution for ``importlib.metadata``, unless a real distribution has the same name."""
        context = DistributionFinder.Context() if context is None else context
        name = self.shim.distribution
        if not name or (context.name is not None and normalized(context.name) != normalized(name)):
            return []
        asked = DistributionFinder.Context(name=name, path=context.path)
        others = [finder for finder in sys.meta_path if finder is not self]
        finds = [find for finder in others if (find := getattr(finder, "find_distributions", None))]
        return [] if any(True for find in finds for _ in find(asked)) else [ShimDistribution(self.shim)]

    def _ask_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        self._is_asking = True
        try:
            finders = [finder for finder in sys.meta_path if finder is not self]
            found = (finder.find_spec(fullname, path, target) for finder in finders)
            # Skip namespace packages: a folder without __init__.py, such as a clone of apex, is not the package.
            return next((spec for spec in found if spec is not None and spec.loader is not None), None)
        finally:
            self._is_asking = False

    def _complete(self, module: ModuleType) -> None:
        """After the import of a module: add what it lacks, and do what is to be done then."""
        if module.__name__ in self.shim.modules:
            self._undo.append(add_lazy_submodules(module, self.shim.lazy, self._refusal))
        if module.__name__ in self._after_import:
            self._undo.append(self._after_import[module.__name__](module))

    def _refusal(self, fullname: str) -> str:
        """The message for a missing name; empty in a real package, unless the shim has advice on the name."""
        parent = sys.modules.get(fullname.rpartition(".")[0])
        return self.shim.refusal(fullname) if self._made(parent) or self.shim.advice(fullname) else ""

    def _made(self, module: ModuleType | None) -> bool:
        loader = getattr(getattr(module, "__spec__", None), "loader", None)
        return isinstance(loader, RowLoader) and loader.shim is self.shim

    def _forget(self, name: str) -> None:
        module = sys.modules.pop(name)
        parent, _, leaf = name.rpartition(".")
        owner = sys.modules.get(parent)
        if owner is not None and vars(owner).get(leaf) is module:
            delattr(owner, leaf)


class RowLoader(Loader):
    """Makes a module from its row in the shim's table."""

    def __init__(self, shim: Shim) -> None:
        self.shim = shim

    def spec(self, fullname: str) -> ModuleSpec:
        """The spec of a module, with the table as its file; packages have paths below it, as in a zip file."""
        is_package = self.shim.is_package(fullname)
        spec = ModuleSpec(fullname, self, origin=self.shim.table, is_package=is_package)
        spec.has_location = True
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(f"{self.shim.table}/{fullname.replace('.', '/')}")
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that Python creates an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the names of the module's row and put them into the module."""
        fullname = module.__name__
        names = {name: get() for name, get in self.shim.row(fullname)}
        # After the imports, because a class may have the name of the submodule that it comes from.
        vars(module).update(names)
        vars(module)["__all__"] = sorted(names)
        module.__doc__ = f"The part of ``{fullname}`` that halfpeak provides; {self.shim.page} describes it."
