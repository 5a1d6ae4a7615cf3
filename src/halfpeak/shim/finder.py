"""Finder: answers imports of one shim; a real module of the same name always wins."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from halfpeak.shim.completion import AfterImport, Completion
from halfpeak.shim.description import Shim, Undo
from halfpeak.shim.distribution import ShimDistribution, add_to_working_set, normalized


class Finder(MetaPathFinder):
    """Stands first in ``sys.meta_path``, and asks everybody behind it before it answers.

    Where a package is missing, it is taken from the shim's tree. Where a real one is installed, the tree gives the
    modules that it lacks. Either way they are imported when they are first asked for, also as attributes of the package.
    """

    def __init__(self, name: str, shim: Shim) -> None:
        self.name = name
        self.shim = shim
        self._undo: list[Undo] = []

    def start(self) -> None:
        """Begin to answer."""
        sys.meta_path.insert(0, self)
        for name in self.shim.packages:
            if name in sys.modules:
                self._complete(sys.modules[name])
        if "pkg_resources" in sys.modules:
            self._announce(sys.modules["pkg_resources"])

    def set_up(self) -> None:
        """Do what the shim wants done besides."""
        if self.shim.setup is not None:
            self._undo.append(self.shim.setup())

    def stop(self) -> None:
        """Leave no trace of what was answered."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        for name in [name for name in sys.modules if self.shim.owns(name)]:
            if self.shim.made(sys.modules[name]):
                self._forget(name)
        for path in [path for path in sys.path_importer_cache if self.shim.has(path)]:
            del sys.path_importer_cache[path]
        importlib.invalidate_caches()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module at or below one of the shim's packages; None for any other.

        Raises:
            ImportError: the shim provides no such module. Who only asks, by ``importlib.util.find_spec``, gets None.
        """
        if fullname == "pkg_resources":
            return self._watched(self._ask_others(fullname, path, target), self._announce)
        if not self.shim.owns(fullname):
            return None
        spec = self._ask_others(fullname, path, target) or self._own(fullname)
        if spec is not None:
            is_watched = fullname in self.shim.packages or self.shim.has(spec.origin)
            return self._watched(spec, self._complete) if is_watched else spec
        # Who asks whether a module is there, and does not import it, has another way in mind.
        if sys._getframe(2).f_globals.get("__name__") != "importlib.util":
            self._refuse(fullname)
        return None

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        """What ``importlib.metadata`` shall know: the shim's distribution, unless a real one has its name."""
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
        for finder in sys.meta_path:
            if finder is self:
                continue
            found = finder.find_spec(fullname, path, target)
            # A folder without __init__.py, such as a clone of apex beside the script, is no package of that name.
            if found is not None and found.loader is not None:
                return found
        return None

    def _own(self, fullname: str) -> ModuleSpec | None:
        file = self.shim.file_of(fullname)
        if file is None:
            return None
        folders = [str(file.parent)] if file.name == "__init__.py" else None
        return spec_from_file_location(fullname, file, submodule_search_locations=folders)

    @staticmethod
    def _watched(spec: ModuleSpec | None, tell: Callable[[ModuleType], None]) -> ModuleSpec | None:
        if spec is not None:
            spec.loader = AfterImport(spec.loader, tell)
        return spec

    def _announce(self, pkg_resources: ModuleType) -> None:
        if self.shim.distribution:
            self._undo.append(add_to_working_set(pkg_resources, self.shim))

    def _refuse(self, fullname: str) -> None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if self.shim.made(parent) or self.shim.advice(fullname):
            raise ImportError(self.shim.refusal(fullname), name=fullname)

    def _complete(self, package: ModuleType) -> None:
        self._undo.append(Completion(package, self.shim).undo)

    def _forget(self, name: str) -> None:
        module = sys.modules.pop(name)
        parent, _, leaf = name.rpartition(".")
        owner = sys.modules.get(parent)
        if owner is not None and vars(owner).get(leaf) is module:
            delattr(owner, leaf)
