"""Scopes of per-operation casts (opt levels O1 and O4): by apex's lists, or by torch's lists for the device."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.compiler import is_dynamo_compiling

from halfpeak.casting import oplists
from halfpeak.casting.registry import CastRule, Place, by_dispatch, replace, restore
from halfpeak.casting.rule_table import Table
from halfpeak.casting.scope import Scope, TracedScope, enter, install, leave, scopes
from halfpeak.casting.suspend import disable_casts
from halfpeak.casting.weight_casts import WeightCache
from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr

_ALLOW_BANNED: Final = {
    f"{path}.{name}": "float32" for path, names in oplists.BANNED for name in names.split()
}


class OpCasts:
    """Casts arguments of torch operations: low for products, float32 for sensitive functions, the widest for mixed dtypes.

    Inside ``with casts:`` every torch call of this thread runs by the lists in :mod:`halfpeak.casting.oplists`, in forward,
    in backward and in the user's losses. Nothing in torch is replaced: the scope is a torch function mode. It may be entered
    several times, in any thread, and left in any order; only the innermost scope applies. Code that :func:`torch.compile`
    traces inside contains the casts. Close a scope before a ``yield``: it would apply to the code that resumes the generator.

    Args:
        dtype: the low dtype.
        registrations: functions that the user wants cast, with their rules, in place of the built-in ones.
        cache: share the cast of a weight among the uses before backward (see
            :class:`~halfpeak.casting.weight_casts.WeightCache`).
        allow_banned: compute :func:`torch.nn.functional.binary_cross_entropy` in float32 rather than refuse low input.
        on_cast: called with a text such as ``"Float->Half (linear)"`` for every cast.

    Attributes:
        traced: the scope in a form that code which :func:`torch.compile` traces can enter.

    Raises:
        ConfigError: ``dtype`` is not a low dtype, or a function of ``registrations`` does not exist.

    >>> casts, x = OpCasts(torch.float16), torch.ones(2, 2)
    >>> with casts:
    ...     (x @ x).dtype, torch.exp(x @ x).dtype, (x @ x + x).dtype
    (torch.float16, torch.float32, torch.float32)
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        registrations: Mapping[Place, CastRule] = MappingProxyType({}),
        cache: bool = True,
        allow_banned: bool = False,
        on_cast: Callable[[str], None] | None = None,
    ) -> None:
        if dtype not in LOW:
            raise ConfigError(f"dtype={short_repr(dtype)} must be torch.float16 or torch.bfloat16")
        self.dtype = dtype
        self._share_casts = cache
        changes, places = by_dispatch(registrations)
        changes = {**(_ALLOW_BANNED if allow_banned else {}), **changes}
        self._table = Table(changes, places, on_cast)
        self.traced = TracedScope(dtype, self._table.key)
        self._replaced = tuple(places)
        self._caches: weakref.WeakSet[WeightCache] = weakref.WeakSet()
        self._local = _Local()

    def __enter__(self) -> OpCasts:
        self._local.entered.append(self._open(enter))
        return self

    def __exit__(self, *_: object) -> None:
        self._close(self._local.entered.pop())

    def install(self) -> None:
        """Open a scope on this thread that stays until :meth:`uninstall`; if it is open, do nothing.

        Contexts that were entered before this call may be left after it. A forked process starts without the scope, so that
        data loader workers do not cast.
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
        """Drop the cached casts of weights, in every thread. Needed only after a write that changes no version counter."""
        for cache in list(self._caches):
            cache.clear()

    def _open(self, place: Callable[[Scope], None]) -> Scope:
        cache = WeightCache(self.dtype) if self._share_casts else None
        if cache is not None:
            self._caches.add(cache)
        replace(self._replaced)
        scope = Scope(self.dtype, self._table, cache)
        place(scope)
        return scope

    def _close(self, scope: Scope) -> None:
        leave(scope)
        restore(self._replaced)


class _Local(threading.local):
    """The scopes that one :class:`OpCasts` or :class:`DeviceCasts` has open on this thread."""

    def __init__(self) -> None:
        self.entered: list[Any] = []
        self.installed: Scope | None = None


_fork_handled = False


def _forget_scopes_in_children() -> None:
    global _fork_handled
    if not _fork_handled and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_all)
    _fork_handled = True


def _leave_all() -> None:
    for scope in scopes():
        leave(scope)


class DeviceCasts:
    """Casts by ``torch.autocast`` of this device type, with its speed and its cache of casts.

    The lists of autocast differ between devices and from apex's (on a CPU softmax, sums and norms stay low). Autocast leaves
    float64 alone and refuses no operation. It is for the forward pass only, as torch recommends: recomputed checkpoints enter
    it again in backward.

    Attributes:
        traced: the scope in a form that code which :func:`torch.compile` traces can enter.

    >>> x, casts = torch.ones(2, 2), DeviceCasts("cpu", torch.bfloat16)
    >>> with casts, casts:
    ...     (x @ x).dtype, (x @ x).softmax(0).dtype
    (torch.bfloat16, torch.bfloat16)
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self._local = _Local()
        self.traced = torch.autocast(device_type, dtype)

    def __enter__(self) -> DeviceCasts:
        scope = torch.autocast(self.device_type, self.dtype)
        scope.__enter__()
        self._local.entered.append(scope)
        return self

    def __exit__(self, *_: object) -> None:
        self._local.entered.pop().__exit__(None, None, None)


@contextmanager
def casts_on(casting: AbstractContextManager[Any] | None) -> Generator[None]:
    """Run the block with the casts of an :class:`OpCasts`, a :class:`DeviceCasts` or another context, and no others.

    None switches off all casts of the thread.

    Code that :func:`torch.compile` traces enters the ``traced`` form of a scope. The compiler of torch 2.11 cannot trace a
    null context, so None enters no context there.
    """
    if casting is None and is_dynamo_compiling():
        yield
    elif casting is None:
        with disable_casts():
            yield
    elif is_dynamo_compiling():
        with casting.traced if isinstance(casting, OpCasts | DeviceCasts) else casting:
            yield
    else:
        with disable_casts(), casting:
            yield


def is_casting(device_type: str) -> bool:
    """Whether operations of this thread are cast, by a scope of halfpeak or by ``torch.autocast``."""
    return bool(scopes()) or torch.is_autocast_enabled(device_type)


__all__ = ["DeviceCasts", "OpCasts", "casts_on", "disable_casts", "is_casting"]
