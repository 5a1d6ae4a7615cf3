"""The context of ``halfpeak run``: shims and the emulated CUDA device, in this process and its spawned children."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import spawn
from typing import Any

from halfpeak.shim.cuda_on_cpu import on_cpu
from halfpeak.shim.installing import install, installed, uninstall


@contextmanager
def emulating(shims: Sequence[str], *, cpu: bool) -> Generator[None]:
    """Install shims and, if ``cpu``, emulate a CUDA device on the CPU; undo both at the end, also after an exception.

    A spawned process imports the main script again, and enters the same context before that import.
    """
    before = installed()
    prepare, scope = spawn.get_preparation_data, _Scope(shims, cpu)

    def get_preparation_data(name: str) -> dict[str, Any]:
        # multiprocessing ignores keys that it does not know.
        return {**prepare(name), "halfpeak": scope}

    def uninstall_new() -> None:
        for name in installed():
            if name not in before:
                uninstall(name)

    with ExitStack() as undo:
        if cpu:
            undo.enter_context(on_cpu())
        # Undone before the device: casts that a script left on are torch function modes above the device's mode.
        undo.callback(uninstall_new)
        for name in shims:
            install(name)
        undo.callback(setattr, spawn, "get_preparation_data", prepare)
        setattr(spawn, "get_preparation_data", get_preparation_data)  # noqa: B010
        yield


def enter_for_life(shims: Sequence[str], cpu: bool) -> None:
    """Enter the context in a child process until the process exits."""
    scope = emulating(shims, cpu=cpu)
    scope.__enter__()
    atexit.register(scope.__exit__, None, None, None)


class _Scope:
    """Enters the parent's context when a child unpickles it, which is before the child imports the script."""

    def __init__(self, shims: Sequence[str], cpu: bool) -> None:
        self._arguments = tuple(shims), cpu

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Sequence[str], bool]]:
        return enter_for_life, self._arguments
