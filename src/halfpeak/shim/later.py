"""Something to do as soon as a module is there: now if it is imported already, else right after its import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from halfpeak.shim.completion import AfterImport
from halfpeak.shim.description import Undo

Action = Callable[[ModuleType], Undo]


def when_imported(name: str, action: Action) -> Undo:
    """Call ``action`` with the module of that name, once it is imported. The import itself is left to the script.

    Returns:
        What takes it back: the waiting, and what ``action`` has done.
    """
    watch = _Watch(name, action)
    watch.start()
    return watch.stop


class _Watch(MetaPathFinder):
    """Waits in ``sys.meta_path`` for one import, which others answer."""

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
        # Others may ask all finders too, and this one among them.
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
