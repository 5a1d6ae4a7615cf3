"""Suspending casts: for a block, in the forward pass of a module, and in the step of an optimizer."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.scope import find_rule, scopes
from halfpeak.core.torch_compat import traced_inline, untraced


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


class WithoutCasts:
    """Forward hooks of a module that run it without casts, and put them back even if ``forward`` raises.

    A copy of the module has a copy of the hooks, with nothing open.
    """

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[None]] = []

    def hook(self, module: nn.Module) -> list[RemovableHandle]:
        """Register the hooks. The second one runs before other hooks, so that the user's hooks compute with casts."""
        return [
            module.register_forward_pre_hook(self.enter),
            module.register_forward_hook(self.leave, prepend=True, always_call=True),
        ]

    @untraced
    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before ``forward``."""
        self._begin(disable_casts())

    @untraced
    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After ``forward``."""
        self._end()

    def _begin(self, scope: AbstractContextManager[None]) -> None:
        scope.__enter__()
        self._open.append(scope)

    def _end(self) -> None:
        if self._open:  # empty if an earlier hook raised
            self._open.pop().__exit__(None, None, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


class WithoutInstalledCasts(WithoutCasts):
    """The same for casts that are installed for the whole thread: those entered by ``with`` around the model stay on."""

    @traced_inline
    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before ``forward``."""
        if not is_compiling():
            found = find_rule("low")
            self._begin(disable_casts() if found is not None and found[0].installed else nullcontext())

    @traced_inline
    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After ``forward``."""
        if not is_compiling():
            self._end()


class StepWithoutCasts(WithoutCasts):
    """Hooks of optimizers that run their steps without casts, except with a closure, which computes a loss.

    torch tells no hook of a step that has raised: the next forward pass of a model puts the casts back.
    """

    def hook_all(self, optimizers: Iterable[Optimizer], models: Iterable[nn.Module]) -> None:
        """Register the hooks."""
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        for model in models:
            model.register_forward_pre_hook(self.enter, prepend=True)

    @traced_inline
    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before ``forward``: end what a step that raised has left open."""
        if not is_compiling():
            while self._open:
                self._end()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _has_closure(args, kwargs):
            self._begin(disable_casts())

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _has_closure(args, kwargs):
            self._end()


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of ``Optimizer.step`` has a closure; ``args[0]`` is the optimizer."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
