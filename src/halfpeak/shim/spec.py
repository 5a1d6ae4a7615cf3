"""Shim: the description, as data, of everything that ``install(name)`` makes importable.

``shim/apex.py``, ``mmcv.py`` and ``mmengine.py`` each define one; ``shim/finder.py`` makes the modules. To add a name or a
module, write it into the table. The object itself lives in halfpeak's package for it, or in ``shim/apex_impl`` if only
old scripts need it, and is the same in every install. A row takes names from halfpeak, from torch, or from rows below
it, but never from ``apex...`` by that name: where a real package is installed, the table fills its gaps, and the
neighbouring module may be the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

Undo = Callable[[], None]
"""A function that reverts a change of the process."""

SUBMODULES: Final = "."
"""The source for names that are submodules of the row's module."""


@dataclass(frozen=True, kw_only=True)
class Shim:
    """One old library: the modules provided, the names that are absent, and the distribution.

    Each row of ``modules`` is a module. It maps a source to the names taken from it, separated by spaces. A name that
    differs in the source is written ``name=name_in_the_source``. A source is one of

    * ``"halfpeak.amp.larc"``: an installed module;
    * ``".frontend"``: another row, relative to this one, which the import then loads;
    * ``"."``: the names are submodules of the row's module, which the import loads;
    * ``"halfpeak.shim.apex_impl.op_lists:torch_overrides"``: the result of calling this function without arguments,
      for values that each install creates anew.

    A row is a package if it has ``"."`` among its sources, or other rows below it.

    Attributes:
        modules: full name of a module -> its row.
        table: the file that defines ``modules``; it is the ``__file__`` of every module.
        distribution: name of the distribution that has the modules; empty for none.
        version: the result of ``importlib.metadata.version(distribution)``.
        elsewhere: full name of an attribute -> ``"module:name"`` in another library, used if that is installed.
        absent: full name of a module or attribute that is not provided -> advice, as the end of a sentence. It applies
            to everything below that name.
        after_import: full name of a module -> a function of the module, called now if it is imported already, else right
            after its import; returns a function that reverts it at uninstall.
        setup: called at install, once the imports work; returns a function that reverts it at uninstall.
        page: the page of the documentation that lists what is provided.
    """

    modules: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    table: str = ""
    distribution: str = ""
    version: str = ""
    elsewhere: Mapping[str, str] = field(default_factory=dict[str, str])
    absent: Mapping[str, str] = field(default_factory=dict[str, str])
    after_import: Mapping[str, Callable[[ModuleType], Undo]] = field(
        default_factory=dict[str, Callable[[ModuleType], Undo]]
    )
    setup: Callable[[], Undo] | None = None
    page: str = "docs/compat/apex.md"

    @property
    def packages(self) -> tuple[str, ...]:
        """The top-level import names."""
        return tuple(name for name in self.modules if "." not in name)

    def owns(self, fullname: str) -> bool:
        """Whether a module of this name would be at or below one of :attr:`packages`."""
        return fullname.partition(".")[0] in self.packages

    def is_package(self, fullname: str) -> bool:
        """Whether the module of this row is a package."""
        below = f"{fullname}."
        return SUBMODULES in self.modules[fullname] or any(name.startswith(below) for name in self.modules)

    def row(self, fullname: str) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The names in a module's row, each with a function that imports the object."""
        for source, entries in self.modules.get(fullname, {}).items():
            for entry in entries.split():
                name, _, original = entry.partition("=")
                if source == SUBMODULES:
                    yield name, partial(import_module, f"{fullname}.{name}")
                else:
                    yield name, partial(_import_name, source, fullname, original or name)

    def lazy(self, fullname: str) -> Any:
        """What a module lacks: its submodule, the object in its row, or that of another library; None if there is none."""
        if fullname in self.modules:
            return import_module(fullname)
        module, _, name = fullname.rpartition(".")
        get = dict(self.row(module)).get(name)
        if get is not None:
            return get()
        module, _, name = self.elsewhere.get(fullname, "").partition(":")
        is_there = module and find_spec(module.partition(".")[0]) is not None
        return getattr(import_module(module), name) if is_there else None

    def advice(self, fullname: str) -> str:
        """The advice for a name that is not provided; empty if there is none."""
        name = fullname
        while name:
            if name in self.absent:
                return self.absent[name]
            name = name.rpartition(".")[0]
        return ""

    def refusal(self, fullname: str) -> str:
        """The message for an import of a name that is not provided."""
        advice = self.advice(fullname) or f"{self.page} lists what it provides"
        return f"halfpeak does not provide {fullname}; {advice}"


def _import_name(source: str, package: str, name: str) -> Any:
    """An object of a source: a module, maybe relative to ``package``, or the result of calling a factory."""
    module, _, factory = source.partition(":")
    owner: Any = import_module(module, package)
    return getattr(getattr(owner, factory)() if factory else owner, name)
