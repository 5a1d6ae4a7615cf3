"""Shim: what ``install(name)`` makes importable, as a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

Undo = Callable[[], None]
"""What takes a change of the process back."""

SUBMODULES: Final = "."
"""The source of a row whose names are submodules of its own."""


@dataclass(frozen=True, kw_only=True)
class Shim:
    """One old library: its modules, what is absent from them, and its distribution.

    A row of ``modules`` is a module. It maps a source to the names that are taken from there, separated by spaces; a name
    that the source calls otherwise is written ``name=name_in_the_source``. A source is one of

    * ``"halfpeak.amp.larc"``: a module that is installed;
    * ``".frontend"``: another row, relative to this one, which the import then loads;
    * ``"."``: no module; the names are those of submodules, which the import loads;
    * ``"halfpeak.shim.apex_impl.op_lists:torch_overrides"``: the result of calling this without arguments, for values
      that each install makes anew.

    A row is a package if it has ``"."`` among its sources, or other rows below it.

    Attributes:
        modules: full name of a module -> its row.
        table: the file that ``modules`` stands in; it is the ``__file__`` of every module.
        distribution: name of the distribution that has the modules; empty for none.
        version: what ``importlib.metadata.version(distribution)`` answers.
        elsewhere: full name of an attribute -> ``"module:name"`` of another library, which answers where it is installed.
        absent: full name of a module or attribute that is not provided -> what to use, as the end of a sentence. It
            applies to everything below that name.
        setup: what else to do at install, once the imports work; returns what takes it back at uninstall.
        page: the page that lists what is provided.
    """

    modules: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    table: str = ""
    distribution: str = ""
    version: str = ""
    elsewhere: Mapping[str, str] = field(default_factory=dict[str, str])
    absent: Mapping[str, str] = field(default_factory=dict[str, str])
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
        """Whether the row may have submodules."""
        below = f"{fullname}."
        return SUBMODULES in self.modules[fullname] or any(name.startswith(below) for name in self.modules)

    def lazy(self, fullname: str) -> Any:
        """The submodule of that name, or what another library has in its place; None if it is neither."""
        if fullname in self.modules:
            return import_module(fullname)
        module, _, name = self.elsewhere.get(fullname, "").partition(":")
        is_there = module and find_spec(module.partition(".")[0]) is not None
        return getattr(import_module(module), name) if is_there else None

    def advice(self, fullname: str) -> str:
        """What to use instead of a name that is not provided; empty if nothing is known."""
        name = fullname
        while name:
            if name in self.absent:
                return self.absent[name]
            name = name.rpartition(".")[0]
        return ""

    def refusal(self, fullname: str) -> str:
        """The message for an import of a name that is not provided."""
        advice = self.advice(fullname) or f"{self.page} lists what it does"
        return f"halfpeak does not provide {fullname}; {advice}"
