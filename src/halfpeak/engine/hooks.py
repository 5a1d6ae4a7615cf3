"""The hooks that an engine puts on its models."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.modules import hook_boundary, hook_norms
from halfpeak.core.policy import Policy
from halfpeak.parts.masters import Masters
from halfpeak.parts.statedict import hook_state_dict

if TYPE_CHECKING:
    from halfpeak.engine.engine import Engine


def hook(model: nn.Module, policy: Policy, masters: Masters) -> list[RemovableHandle]:
    """Put the hooks on a model that its policy asks for."""
    handles = [*hook_boundary(model, policy), *hook_norms(model, policy)]
    if policy.param is not None or policy.masters:
        handles += hook_state_dict(model, masters)
    return handles


class CatchUp:
    """A forward pre-hook that lets the engine put right what an exception in ``optimizer.step()`` has left behind.

    Afterwards would be too late: a parameter must not change between forward and backward. The engine is held weakly,
    and a deep copy or a pickle of the model lets go of it.
    """

    def __init__(self, engine: Engine | None) -> None:
        self._engine = None if engine is None else weakref.ref(engine)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Catch up; a compiled forward pass leaves it to the next backward pass."""
        if self._engine is None or is_compiling():
            return
        engine = self._engine()
        if engine is not None:
            engine.catch_up()

    def __deepcopy__(self, memo: dict[int, Any]) -> CatchUp:
        return CatchUp(None)

    def __reduce__(self) -> tuple[type[CatchUp], tuple[None]]:
        return CatchUp, (None,)
