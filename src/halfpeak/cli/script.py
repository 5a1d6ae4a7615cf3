"""Program: runs a script or a module in this process, as ``python`` would run it."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType, TracebackType
from typing import Any
from zipfile import is_zipfile

from halfpeak.core.errors import ConfigError

FAILED, INTERRUPTED = 1, 130


@dataclass(frozen=True)
class Program:
    """A script or module to run, and its arguments.

    Attributes:
        target: the path of a script (or of a folder or zip file with a ``__main__.py``), or the name of a module.
        is_module: whether ``target`` is the name of a module.
        arguments: ``sys.argv[1:]`` for the program.
    """

    target: str
    is_module: bool
    arguments: Sequence[str] = ()

    def check(self) -> None:
        """Check that the target exists. Call this inside :meth:`as_started`, which sets ``sys.path``.

        Raises:
            ConfigError: the target does not exist.
        """
        if not self.is_module:
            if not os.path.exists(self.target):
                raise ConfigError(f"there is no file {self.target!r}; write halfpeak run SCRIPT [ARGUMENTS]")
            if os.path.isdir(self.target) and not os.path.exists(os.path.join(self.target, "__main__.py")):
                raise ConfigError(
                    f"the folder {self.target!r} has no __main__.py; name a script in it, or write -m MODULE"
                )
            return
        try:
            found = find_spec(self.target)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.target}.".startswith(f"{error.name}."):
                return  # the package exists, but a module that it imports does not: run() shows this error
            found = None
        if found is None:
            raise ConfigError(f"there is no module {self.target!r}; write halfpeak run -m MODULE [ARGUMENTS]")

    def run(self, advise: Callable[[BaseException], None] = lambda error: None) -> int:
        """Run the program to its end; returns the exit status. A traceback begins with the frames of the script.

        Args:
            advise: called with the exception that ended the program, after its traceback was printed, or before a message of
                ``SystemExit``.

        Raises:
            SystemExit: the script raised it.
        """
        threads = threading.enumerate()
        try:
            if self.is_module:
                _keep(runpy.run_module(self.target, run_name="__main__", alter_sys=True))
            elif self._is_archive():
                _keep(runpy.run_path(self.target, run_name="__main__"))
            else:
                _MainLoader("__main__", os.path.abspath(self.target)).run()
        except SystemExit as left:
            if left.code:
                advise(left)
            raise
        except BaseException as error:
            trace = _below(error.__traceback__)
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            advise(error)
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
        finally:
            for thread in threading.enumerate():
                if thread not in threads and not thread.daemon:
                    thread.join()
        return 0

    @contextmanager
    def as_started(self) -> Generator[None]:
        """Set ``sys.argv`` and ``sys.path`` as the program expects; restore them and ``__main__`` at the end."""
        argv, path, main = sys.argv, sys.path, sys.modules["__main__"]
        launcher = 0 if sys.flags.safe_path else 1
        sys.argv = [self.target, *self.arguments]
        sys.path = [*self._home(), *path[launcher:]]
        try:
            yield
        finally:
            ended = sys.modules["__main__"]
            sys.argv, sys.path, sys.modules["__main__"] = argv, path, main
            _keep(vars(ended))

    def _home(self) -> list[str]:
        if sys.flags.safe_path:
            return []
        if self.is_module:
            return [os.getcwd()]
        if self._is_archive():
            return []  # runpy adds the path itself
        return [os.path.dirname(os.path.realpath(self.target))]

    def _is_archive(self) -> bool:
        return os.path.isdir(self.target) or is_zipfile(self.target)


def _keep(namespace: dict[str, Any]) -> None:
    """Keep the globals of a program alive until the interpreter ends, as python does.

    Deleting a process group earlier waits for its threads, which may wait for the interpreter at the same time.
    """
    vars(sys.modules["__main__"]).setdefault("__programs__", []).append(namespace)


class _MainLoader(SourceFileLoader):
    """A loader that runs a file as the main module, as ``python FILE`` does: without a spec and a ``.pyc``."""

    def run(self) -> None:
        main = ModuleType("__main__")
        vars(main).update(__file__=self.path, __loader__=self, __builtins__=builtins)
        sys.modules["__main__"] = main
        self.exec_module(main)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _below(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
        trace = trace.tb_next
    return trace
