"""StepGuard: no optimizer steps while a backward pass is under way, whose gradients are scaled, or set aside."""

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
from halfpeak.engine.optimizer import prepared_of


class Passed(Protocol):
    """What looks after parameters during a backward pass."""

    def parameters(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Those that the pass may reach, each with the gradient that was set aside."""
        ...


class StepGuard:
    """Refuses the step of an optimizer, whether it was prepared or not, from here until :meth:`end`.

    The global hook that asks it holds it weakly, and is removed with it, also after an exception.

    Args:
        passed: whose parameters must not be stepped.
        unit: whether the loss scale is always 1, so that only what was set aside would be missed.
    """

    def __init__(self, passed: Iterable[Passed], *, unit: bool) -> None:
        self._passed, self._unit = tuple(passed), unit
        self._known = weakref.ref(self, _forget)
        register_optimizer_step_pre_hook(_Hook(self._known))

    def end(self) -> None:
        """The pass is over."""
        self._passed = ()
        _forget(self._known)
        # Also drops its callback, which has nothing left to do.
        del self._known

    def refuse(self, optimizer: Optimizer) -> None:
        """Before the step of an optimizer.

        Raises:
            OrderError: its gradients are scaled, or set aside.
        """
        one = prepared_of(optimizer)
        stepped = set(map(id, params_of(optimizer) if one is None else one.window_pairs().model_params))
        for parameter, aside in chain.from_iterable(each.parameters() for each in self._passed):
            if id(parameter) in stepped and (aside is not None or not (self._unit or parameter.grad is None)):
                raise OrderError(
                    "optimizer.step() was called in a backward pass, in which gradients are multiplied by the loss scale, "
                    "and earlier ones set aside; call it after engine.backward(loss), with amp after the block of "
                    "amp.scale_loss, and not in a hook of a parameter"
                )


class _Hook:
    """A hook of all optimizers that asks a guard for as long as there is one."""

    def __init__(self, known: weakref.ref[Any]) -> None:
        self.known = known

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        guard = self.known()
        if guard is not None:
            guard.refuse(optimizer)


def _forget(known: weakref.ref[Any]) -> None:
    """Take the hook away that asks this guard."""
    for key, hook in list(_global_optimizer_pre_hooks.items()):
        if isinstance(hook, _Hook) and hook.known is known:
            del _global_optimizer_pre_hooks[key]
