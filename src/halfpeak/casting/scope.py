"""One scope of per-operation casts: a torch function mode that runs each dispatched call by its rule.

Scopes live on torch's stack of function modes, which belongs to a thread. There is no other global state: whether
casting is active, and which scope applies, is read from that stack.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from halfpeak.casting.rule_table import Table, traced_rule
from halfpeak.casting.rules import RULES, Casting, Function, Rule
from halfpeak.casting.weight_casts import WeightCache
from halfpeak.core.torch_compat import traced_inline

NO_RULES: Final[dict[Any, Rule]] = {}
"""The lookup of a suspended scope: every call runs as written."""


class Scope(Casting):
    """The rules in force between an entry and its exit.

    Attributes:
        dtype: the low dtype.
        cache: the weight cache, or None to cast at every use.
        table: the rules of the scope.
        lookup: the rules now in force: the table's, or none while the scope is suspended.
        key: the key of the table while its rules are in force, else None.
        installed: whether the scope was put below the user's own modes.
    """

    def __init__(self, dtype: torch.dtype, table: Table, cache: WeightCache | None) -> None:
        super().__init__()
        self.dtype = dtype
        self.cache = cache
        self.table = table
        self.lookup: Mapping[Any, Rule] = table.rules
        self.key: str | None = table.key
        self.installed = False
        self._suspenders: set[object] = set()
        self._suspended: list[Scope] = []

    @traced_inline
    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` by its rule."""
        rule = RULES.get(traced_rule(func, self.key)) if is_dynamo_compiling() else self.lookup.get(func)
        if rule is not None:
            return rule(self, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def suspend(self, suspender: object) -> None:
        """Stop casting until :meth:`resume` by the same suspender. Several may suspend; a second call changes nothing."""
        self._suspenders.add(suspender)
        self._update_lookup()

    def resume(self, suspender: object) -> None:
        """Undo :meth:`suspend` and drop the cached casts of weights, because writes meanwhile were not seen."""
        self._suspenders.discard(suspender)
        self._update_lookup()
        if self.cache is not None:
            self.cache.clear()

    def is_suspended_by(self, suspender: object) -> bool:
        """Whether ``suspender`` has called :meth:`suspend` and not :meth:`resume`."""
        return suspender in self._suspenders

    def _update_lookup(self) -> None:
        self.lookup = NO_RULES if self._suspenders else self.table.rules
        self.key = None if self._suspenders else self.table.key

    @contextmanager
    def without_casts(self) -> Generator[None]:
        """Run the body without casts in this scope: for calls that casting itself makes outside a rule."""
        lookup, self.lookup = self.lookup, NO_RULES
        try:
            yield
        finally:
            self.lookup = lookup


class TracedScope(Casting):
    """The rules of a scope for code that :func:`torch.compile` traces, which can enter this and not a :class:`Scope`."""

    def __init__(self, dtype: torch.dtype, key: str) -> None:
        super().__init__()
        self.dtype = dtype
        self.cache = None
        self.key = key

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` by its rule."""
        rule = RULES.get(traced_rule(func, self.key))
        if rule is not None:
            return rule(self, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


def scopes() -> list[Scope]:
    """The scopes of this thread, outermost first."""
    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, Scope)]


def find_rule(key: Any) -> tuple[Scope, Rule] | None:
    """The scope in force on this thread and its rule for ``key``; None where the call runs as written.

    Of several scopes one at most is in force, the innermost, because entering it has suspended all others.
    """
    for scope in scopes():
        rule = scope.lookup.get(key)
        if rule is not None:
            return scope, rule
    return None


def enter(scope: Scope) -> None:
    """Push ``scope`` and suspend all others until it is left."""
    _suspend_others(scope)
    _push_mode(scope)
    _allow_mixed_rnn_inputs.enter(scope)


def install(scope: Scope) -> None:
    """Put ``scope`` below every function mode that may be left before it.

    A context that was entered earlier pops whatever is on top, so a scope that outlives it must lie below it. The mode of
    :func:`torch.set_default_device` must be the lowest and stays so.
    """
    scope.installed = True
    stack = [_pop_mode() for _ in _get_current_function_mode_stack()][::-1]
    place = 0
    while place < len(stack) and (
        isinstance(stack[place], DeviceContext) or getattr(stack[place], "installed", False)
    ):
        place += 1
    for mode in stack[:place]:
        _push_mode(mode)
    _suspend_others(scope)
    _push_mode(scope)
    for mode in stack[place:]:
        _push_mode(mode)
        if isinstance(mode, Scope):
            mode._suspended.append(scope)
            scope.suspend(mode)
    _allow_mixed_rnn_inputs.enter(scope)


def leave(scope: Scope) -> None:
    """Remove ``scope`` from the stack, wherever it is, and resume what it suspended. Calling it twice changes nothing."""
    stack: list[Any] = _get_current_function_mode_stack()
    if scope in stack:
        place = stack.index(scope)
        for _ in stack[place:]:
            _pop_mode()
        for mode in stack[place + 1 :]:
            _push_mode(mode)
    for other in scope._suspended:
        other.resume(scope)
    _allow_mixed_rnn_inputs.leave(scope)


def _suspend_others(scope: Scope) -> None:
    for other in scopes():
        scope._suspended.append(other)
        other.suspend(scope)


class _AllowMixedRnnInputs(threading.local):
    """Lets ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` take a low input beside float32 weights.

    Their ``forward`` refuses that unless autocast is on for some device type, before any call is dispatched. So it
    is switched on for a device type that torch still names but no longer supports, which affects no operation.
    """

    DEVICE = "ipu"

    def __init__(self) -> None:
        self._scopes: set[Scope] = set()
        self._before = False

    def enter(self, scope: Scope) -> None:
        if not self._scopes:
            self._before = torch.is_autocast_enabled(self.DEVICE)
        self._scopes.add(scope)
        torch.set_autocast_enabled(self.DEVICE, True)

    def leave(self, scope: Scope) -> None:
        self._scopes.discard(scope)
        if not self._scopes:
            torch.set_autocast_enabled(self.DEVICE, self._before)


_allow_mixed_rnn_inputs = _AllowMixedRnnInputs()
