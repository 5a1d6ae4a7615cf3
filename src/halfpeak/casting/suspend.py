"""Suspending casts: for a block, or between a pair of hooks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.compiler import is_compiling

from halfpeak.casting.scope import find_rule, scopes
from halfpeak.core.torch_compat import traced_inline


@contextmanager
def disable_casts() -> Generator[None]:
    """Run the block without casts on this thread, as if no scope were open.

    Nests, survives exceptions, and does nothing where no scope is open. A scope entered inside casts as usual.

    >>> import torch
    >>> from halfpeak.casting.casts import OpCasts
    >>> x = torch.ones(2, 2)
    >>> with OpCasts(torch.bfloat16):
    ...     with disable_casts():
    ...         exact = x @ x
    ...     low = x @ x
    >>> exact.dtype, low.dtype
    (torch.float32, torch.bfloat16)
    """
    open_scopes, suspender = scopes(), object()
    try:
        for scope in open_scopes:
            scope.suspend(suspender)
        yield
    finally:
        for scope in open_scopes:
            scope.resume(suspender)


def suspend(suspender: object) -> None:
    """Suspend casting on this thread until :func:`resume` by the same suspender, such as a module or an optimizer.

    For a pair of hooks. Several may suspend at once; a second call of one changes nothing.
    """
    for scope in scopes():
        scope.suspend(suspender)


def resume(suspender: object) -> None:
    """Undo :func:`suspend`; does nothing if ``suspender`` has not suspended casting on this thread."""
    for scope in scopes():
        if scope.is_suspended_by(suspender):
            scope.resume(suspender)


def suspend_autocast(suspender: object) -> None:
    """Switch ``torch.autocast`` off on this thread until :func:`resume_autocast` by the same suspender.

    Only its flag: ``torch.autocast(enabled=False)`` counts its nesting, too, which an interrupted pass would leave wrong.
    """
    accelerator = torch.accelerator.current_accelerator()
    known = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    found = [name for name in known if torch.is_autocast_enabled(name)]
    _autocast.off.setdefault(suspender, []).append(found)
    for name in found:
        torch.set_autocast_enabled(name, False)


def resume_autocast(suspender: object) -> None:
    """Undo :func:`suspend_autocast`; does nothing if ``suspender`` has not switched it off on this thread."""
    off = _autocast.off.get(suspender)
    for name in off.pop() if off else ():
        torch.set_autocast_enabled(name, True)


class _Autocast(threading.local):
    """The device types for which each suspender has switched ``torch.autocast`` off on this thread, the last call last."""

    def __init__(self) -> None:
        self.off: weakref.WeakKeyDictionary[object, list[list[str]]] = weakref.WeakKeyDictionary()


_autocast: Final = _Autocast()


@traced_inline
def suspend_installed(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A forward pre-hook for a model that is not to be cast per operation: casts installed for the thread are off in it.

    Casts that were entered by ``with`` around the model stay on.
    """
    if not is_compiling():
        found = find_rule("low")
        if found is not None and found[0].installed:
            suspend(module)


@traced_inline
def resume_installed(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """The forward hook that ends :func:`suspend_installed`; called also if ``forward`` raises."""
    if not is_compiling():
        resume(module)
