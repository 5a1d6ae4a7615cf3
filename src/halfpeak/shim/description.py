"""Shim: what ``install(name)`` brings, as a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Final

ROOT: Final = Path(__file__).resolve().parent

Undo = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Shim:
    """One row of the table.

    Attributes:
        packages: top-level import name -> its folder (a package) or file (a module), relative to ``halfpeak/shim``.
        version: what ``importlib.metadata.version(distribution)`` answers.
        distribution: name of the distribution that has the packages; empty for none.
        absent: full name of a module or attribute that is not provided -> what to use, as the end of a sentence. It
            speaks for everything below that name.
        setup: what else to do at install; returns what takes it back at uninstall. It runs once the imports work.
        page: the page that lists what is provided.
    """

    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    distribution: str = ""
    version: str = ""
    absent: Mapping[str, str] = field(default_factory=dict[str, str])
    setup: Callable[[], Undo] | None = None
    page: str = "docs/compat/apex.md"

    def owns(self, fullname: str) -> bool:
        """Whether a module of this name would be below one of the packages."""
        return fullname.partition(".")[0] in self.packages

    def refusal(self, fullname: str) -> str:
        """What to tell who asked for a name that is not provided."""
        advice = self.advice(fullname) or f"{self.page} lists what it does"
        return f"halfpeak does not provide {fullname}; {advice}"

    def advice(self, fullname: str) -> str:
        """What to use instead of a name that is not provided; empty if nothing is known."""
        name = fullname
        while name:
            if name in self.absent:
                return self.absent[name]
            name = name.rpartition(".")[0]
        return ""

    def file_of(self, fullname: str) -> Path | None:
        """The file that is behind an import name, if the tree has one."""
        top, *rest = fullname.split(".")
        place = ROOT.joinpath(self.packages[top], *rest)
        for candidate in (
            place / "__init__.py",
            place if place.suffix == ".py" else place.with_suffix(".py"),
        ):
            if candidate.is_file():
                return candidate
        return None

    def made(self, module: ModuleType | None) -> bool:
        """Whether a module comes from one of the shim's trees."""
        return self.has(getattr(getattr(module, "__spec__", None), "origin", None))

    def has(self, path: str | None) -> bool:
        """Whether a file or folder is in one of the shim's trees."""
        if path is None:
            return False
        places = [ROOT / place for place in self.packages.values()]
        return any(place == Path(path) or place in Path(path).parents for place in places)
