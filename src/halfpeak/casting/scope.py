"""One scope of per-operation casts: a torch function mode that gives each announced call to its rule.

Scopes live on torch's stack of function modes, which belongs to a thread. There is no other global state: whether
casting is active, and which scope decides, is read off that stack.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from halfpeak.casting.cache import WeightCache
from halfpeak.casting.rules import RULES, Casting, Function, Rule
from halfpeak.casting.tables import Table, traced_rule
from halfpeak.core.tracing import traced_inline


class Lookup(Protocol):
    """What a scope asks for a call's rule: a dict, or something that stands in for one."""

    def get(self, function: Any, /) -> Rule | None:
        """The rule of ``function``, or None to run it as written."""
        ...


NO_RULES: Final[dict[Any, Rule]] = {}
"""The lookup of a scope that is held: every call runs as written."""


class Scope(Casting):
    """The rules in force between an entry and its exit.

    Attributes:
        dtype: the low dtype.
        cache: the weight cache, or None to cast at every use.
        table: the rules of the scope.
        lookup: the rules now in force: the table's, or none while the scope is held or paused.
        key: the key of the table while its rules are in force, else None.
        installed: whether the scope was put below the modes of the user.
    """

    def __init__(self, dtype: torch.dtype, table: Table, cache: WeightCache | None) -> None:
        super().__init__()
        self.dtype = dtype
        self.cache = cache
        self.table = table
        self.lookup: Lookup = table.rules
        self.key: str | None = table.key
        self.installed = False
        self._idle: Lookup = table.rules
        self._holders: set[object] = set()
        self._holding: list[Scope] = []

    @traced_inline
    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` by its rule."""
        rule = RULES.get(traced_rule(func, self.key)) if is_dynamo_compiling() else self.lookup.get(func)
        if rule is not None:
            return rule(self, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def hold(self, holder: object) -> None:
        """Stop casting until :meth:`release` by the same holder; several may hold. Twice is as good as once."""
        self._holders.add(holder)
        self._settle()

    def release(self, holder: object) -> None:
        """Undo :meth:`hold`. Copies of weights go, unless the holder has watched over them meanwhile."""
        self._holders.discard(holder)
        self._settle()
        if self.cache is not None and not (isinstance(holder, Scope) and holder.cache is self.cache):
            self.cache.clear()

    def stand_in(self, lookup: Lookup | None) -> None:
        """Ask ``lookup`` whenever the scope is not held; None puts the table back."""
        self._idle = self.table.rules if lookup is None else lookup
        self._settle()

    def _settle(self) -> None:
        lookup = NO_RULES if self._holders else self._idle
        # In one statement, so that an exception cannot come between the two.
        self.lookup, self.key = lookup, self.table.key if lookup is self.table.rules else None

    @contextmanager
    def unseen(self) -> Generator[None]:
        """Let calls pass that casting itself makes outside a rule, such as reading a weight's address."""
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
    """The scope that decides on this thread and its rule for ``key``, or None where that is to run as written."""
    for scope in reversed(scopes()):
        rule = scope.lookup.get(key)
        if rule is not None:
            return scope, rule
    return None


def enter(scope: Scope) -> None:
    """Put ``scope`` on top; it alone decides until it is left."""
    try:
        _suppress_others(scope)
        _push_mode(scope)
        _allow_mixed_rnn_inputs.enter(scope)
    except BaseException:
        leave(scope)
        raise


def install(scope: Scope) -> None:
    """Put ``scope`` below every function mode that could be left before it is.

    A context entered earlier pops what it finds on top, so a scope that outlives it must not be there. The default
    device (:func:`torch.set_default_device`) insists on the lowest place and keeps it.
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
    _suppress_others(scope)
    _push_mode(scope)
    for mode in stack[place:]:
        _push_mode(mode)
        if isinstance(mode, Scope):
            mode._holding.append(scope)
            scope.hold(mode)
    _allow_mixed_rnn_inputs.enter(scope)


def leave(scope: Scope) -> None:
    """Take ``scope`` off the stack, wherever it is by now, and release what it held. Twice is as good as once."""
    others = [mode for mode in _get_current_function_mode_stack() if mode is not scope]
    try:
        _leave(scope, others)
    except BaseException:
        # Ctrl-C comes at any line. Half way out, casts would stay on for good.
        _leave(scope, others)
        raise


@contextmanager
def contained() -> Generator[None]:
    """Leave every scope that the body has entered and not left, because an exception came in its very ``__exit__``."""
    before = scopes()
    try:
        yield
    finally:
        for scope in scopes():
            if scope not in before:
                leave(scope)


def _leave(scope: Scope, others: list[Any]) -> None:
    _set_stack(others)
    for held in scope._holding:
        held.release(scope)
    scope._holding.clear()
    _allow_mixed_rnn_inputs.leave(scope)


def _set_stack(modes: list[Any]) -> None:
    now = _get_current_function_mode_stack()
    while len(now) > len(modes) or any(a is not b for a, b in zip(now, modes, strict=False)):
        _pop_mode()
        now = _get_current_function_mode_stack()
    for mode in modes[len(now) :]:
        _push_mode(mode)


def _suppress_others(scope: Scope) -> None:
    for other in scopes():
        scope._holding.append(other)
        other.hold(scope)


class _AllowMixedRnnInputs(threading.local):
    """Lets ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` take a low input beside float32 weights.

    Their ``forward`` refuses that unless autocast is on for some device type, before any call is announced. So it is
    switched on for a device type that torch names but no longer runs on; that changes the outcome of no operation.
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
