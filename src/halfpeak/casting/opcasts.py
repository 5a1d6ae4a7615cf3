"""Per-operation casts as a scope: what opt levels O1 (float16) and O4 (bfloat16) do."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Final

import torch

from halfpeak.casting import oplists
from halfpeak.casting.cache import WeightCache
from halfpeak.casting.registry import Registrations, replace, restore
from halfpeak.casting.scope import Scope, TracedScope, enter, install, leave, scopes
from halfpeak.casting.shadows import ShadowWeights
from halfpeak.casting.suspend import disable_casts
from halfpeak.casting.tables import Table
from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import ConfigError

NONE: Final = Registrations()
"""No registrations."""

_ALLOW_BANNED: Final = {
    f"{path}.{name}": "float32" for path, names in oplists.BANNED for name in names.split()
}


class OpCasts:
    """Casts the arguments of torch operations: products low, sensitive functions in float32, mixtures to the widest.

    Inside ``with casts:`` every torch call of this thread runs by the lists in :mod:`halfpeak.casting.oplists`, in
    forward and in backward, also where the calls stand in a loss written by the user. Nothing in torch is replaced:
    the scope is a torch function mode. It may be entered again, in any thread (each has its own scopes; a new thread
    starts without), and left in any order; the innermost decides alone. What is traced by :func:`torch.compile` inside
    the scope contains the casts.

    A scope that a generator leaves open is seen by whoever resumes it: close it before each ``yield``.

    Args:
        dtype: the low dtype.
        registrations: functions that the user wants cast, in place of the built-in rule.
        cache: share the cast of a weight among the uses before backward (see
            :class:`~halfpeak.casting.cache.WeightCache`).
        shadow: share it among all scopes of this object, and hold it until :meth:`clear_cache` (see
            :class:`~halfpeak.casting.shadows.ShadowWeights`). Between scopes nobody watches the weights, so call that
            after a write then that torch cannot see, such as by torch's fused optimizers.
        allow_banned: compute :func:`torch.nn.functional.binary_cross_entropy` in float32 rather than refuse low input.
        on_cast: called with a text such as ``"Float->Half (linear)"`` for every cast.

    Attributes:
        dtype: the low dtype.
        shadows: the casts of weights that are held, or None.
        traced: the scope in a form that code which :func:`torch.compile` traces can enter.

    Raises:
        ConfigError: ``dtype`` is not a low dtype.

    >>> casts, x = OpCasts(torch.float16), torch.ones(2, 2)
    >>> with casts:
    ...     (x @ x).dtype, torch.exp(x @ x).dtype, (x @ x + x).dtype
    (torch.float16, torch.float32, torch.float32)
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        registrations: Registrations = NONE,
        cache: bool = True,
        shadow: bool = False,
        allow_banned: bool = False,
        on_cast: Callable[[str], None] | None = None,
    ) -> None:
        if dtype not in LOW:
            raise ConfigError(f"dtype={dtype!r} is not low; write torch.float16 or torch.bfloat16")
        self.dtype = dtype
        self._share_casts = cache
        self.shadows = ShadowWeights(dtype) if shadow else None
        places = registrations.places()
        changes = {**(_ALLOW_BANNED if allow_banned else {}), **registrations.changes()}
        self._table = Table(changes, places, on_cast)
        self.traced = TracedScope(dtype, self._table.key)
        self._replaced = tuple(places)
        self._caches: weakref.WeakSet[WeightCache] = weakref.WeakSet()
        self._local = _Local()

    def __enter__(self) -> OpCasts:
        self._local.entered.append(self._open(enter))
        return self

    def __exit__(self, *_: object) -> None:
        entered = self._local.entered
        # Those that :func:`contained` had to leave are still listed.
        while entered[-1] not in scopes() and len(entered) > 1:
            entered.pop()
        self._close(entered[-1])
        entered.pop()

    def install(self) -> None:
        """Open a scope on this thread that stays until :meth:`uninstall`; if it is open, do nothing.

        Contexts that were entered before may be left after. A forked process starts without the scope, so that data
        loader workers do not cast.
        """
        if self._local.installed is None:
            _forget_scopes_in_children()
            self._local.installed = self._open(install)

    def uninstall(self) -> None:
        """Undo :meth:`install`; if that was not called on this thread, do nothing."""
        if self._local.installed is not None:
            self._close(self._local.installed)
            self._local.installed = None

    def clear_cache(self) -> None:
        """Forget the low copies of weights, in every thread. Needed only after a write that torch cannot see."""
        for cache in list(self._caches):
            cache.clear()
        if self.shadows is not None:
            self.shadows.clear()

    def _open(self, place: Callable[[Scope], None]) -> Scope:
        cache = self.shadows
        if cache is None and self._share_casts:
            cache = WeightCache(self.dtype)
            self._caches.add(cache)
        replace(self._replaced)
        scope = Scope(self.dtype, self._table, cache)
        place(scope)
        return scope

    def _close(self, scope: Scope) -> None:
        leave(scope)
        restore(self._replaced)


class _Local(threading.local):
    """The scopes that one :class:`OpCasts` has open on this thread."""

    def __init__(self) -> None:
        self.entered: list[Scope] = []
        self.installed: Scope | None = None


_fork_handled = False


def _forget_scopes_in_children() -> None:
    global _fork_handled
    if not _fork_handled and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_all)
    _fork_handled = True


def _leave_all() -> None:
    for scope in reversed(scopes()):
        leave(scope)


__all__ = ["NONE", "OpCasts", "disable_casts"]
