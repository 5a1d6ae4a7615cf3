"""StepGuard: refuses the step of an optimizer during a backward pass, while gradients are scaled or stashed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from halfpeak.core.errors import OrderError
from halfpeak.core.optimizer_state import params_of
from halfpeak.engine.step_hooks import prepared_of


class Stasher(Protocol):
    """An object that stashes the gradients of some parameters during a backward pass."""

    def reachable(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The parameters that the pass may reach, each with its stashed gradient."""
        ...


class StepGuard:
    """Refuses the step of any optimizer, prepared or not, over given parameters until :meth:`end`.

    A global step hook has a weak reference to this object, and is removed with it, also after an exception.

    Args:
        stashers: of the parameters that must not be stepped.
        unit: whether the loss scale is always 1: then only stashed gradients make a step wrong.
    """

    def __init__(self, stashers: Iterable[Stasher], *, unit: bool) -> None:
        self._stashers, self._unit = tuple(stashers), unit
        self._known = weakref.ref(self, _forget)
        register_optimizer_step_pre_hook(_Hook(self._known))

    def end(self) -> None:
        """End the guard, because the backward pass is over."""
        self._stashers = ()
        _forget(self._known)
        # Also drops the callback of the weak reference, which is no longer needed.
        del self._known

    def refuse(self, optimizer: Optimizer) -> None:
        """Check an optimizer that is about to step.

        Raises:
            OrderError: gradients of its parameters are scaled or stashed.
        """
        one = prepared_of(optimizer)
        stepped = set(map(id, params_of(optimizer) if one is None else one.pairs_now().model_params))
        for parameter, aside in chain.from_iterable(each.reachable() for each in self._stashers):
            if id(parameter) in stepped and (aside is not None or not (self._unit or parameter.grad is None)):
                raise OrderError(
                    "optimizer.step() was called during a backward pass, while gradients are multiplied by the loss scale; "
                    "call it after engine.backward(loss), with amp after the `with amp.scale_loss` block, and not in a hook "
                    "of a parameter"
                )


class _Hook:
    """A step pre-hook of all optimizers, which calls a guard while the guard exists."""

    def __init__(self, known: weakref.ref[Any]) -> None:
        self.known = known

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        guard = self.known()
        if guard is not None:
            guard.refuse(optimizer)


def _forget(known: weakref.ref[Any]) -> None:
    """Remove the global hook of a guard."""
    for key, hook in list(_global_optimizer_pre_hooks.items()):
        if isinstance(hook, _Hook) and hook.known is known:
            del _global_optimizer_pre_hooks[key]
