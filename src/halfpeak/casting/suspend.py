"""Suspending casts: for a block, or until a running function returns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from halfpeak.casting.rules import Rule
from halfpeak.casting.scope import Scope, find_rule, scopes
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


def suspend_until_return(frame: FrameType) -> None:
    """Suspend casting on this thread until :func:`resume`, or until the function running in ``frame`` is left.

    For a pair of hooks whose second does not run when the function between them raises, such as the step hooks of
    :class:`torch.optim.Optimizer`. Suspensions nest.
    """
    found = find_rule("low")
    if found is not None:
        scope = found[0]
        scope.override_lookup(_SuspendedLookup(scope, frame))
        return
    for scope in scopes():
        if isinstance(scope.lookup, _SuspendedLookup):
            scope.lookup.frames.append(frame)
            return


@traced_inline
def suspend_installed(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A forward pre-hook for a model that is not to be cast per operation: casts installed for the thread are off in it.

    Casts that were entered by ``with`` around the model stay on.
    """
    if not is_compiling():
        found = find_rule("low")
        if found is not None and found[0].installed:
            suspend_until_return(sys._getframe(1))


def resume() -> None:
    """End the innermost :func:`suspend_until_return` of this thread; does nothing if there is none."""
    for scope in scopes():
        if isinstance(scope.lookup, _SuspendedLookup):
            scope.lookup.resume()
            return


class _SuspendedLookup:
    """A lookup without rules, as long as one of ``frames`` is still running.

    An exception that left a frame is noticed at the next dispatched call: the frame is no longer among the callers.
    """

    def __init__(self, scope: Scope, frame: FrameType) -> None:
        self.frames = [frame]
        self._scope = scope
        self._thread = threading.get_ident()

    def get(self, function: Any, /) -> Rule | None:
        """None while suspended; afterwards the rule in the scope's own table."""
        if (
            threading.get_ident() != self._thread
        ):  # a backward thread of the step's closure, which the frames do not call
            return None
        while self.frames and not _is_running(self.frames[-1]):
            self.frames.pop()
        if self.frames:
            return None
        self._end()
        return self._scope.table.rules.get(function)

    def resume(self) -> None:
        """End the innermost suspension."""
        self.frames.pop()
        if not self.frames:
            self._end()

    def _end(self) -> None:
        self._scope.override_lookup(None)
        if self._scope.cache is not None:
            self._scope.cache.clear()


def _is_running(frame: FrameType) -> bool:
    caller: FrameType | None = sys._getframe(1)
    while caller is not None:
        if caller is frame:
            return True
        caller = caller.f_back
    return False
