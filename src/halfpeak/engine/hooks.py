"""The hooks that an engine puts on its models."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.modules import hook_boundary, hook_norms
from halfpeak.casting.opcasts import OpCasts
from halfpeak.casting.shadows import Homes, ShadowWeights
from halfpeak.core.policy import Policy
from halfpeak.fused.optimizer import FusedOptimizer
from halfpeak.parts.buffers import norms_of
from halfpeak.parts.masters import Masters, targets_of
from halfpeak.parts.statedict import hook_state_dict

if TYPE_CHECKING:
    from halfpeak.engine.engine import Engine


def hook(model: nn.Module, policy: Policy, masters: Masters) -> list[RemovableHandle]:
    """Put the hooks on a model that its policy asks for."""
    handles = [*hook_boundary(model, policy), *hook_norms(model, policy)]
    if policy.param is not None or policy.masters:
        handles += hook_state_dict(model, masters)
    return handles


def hook_loads(model: nn.Module, engine: Engine) -> list[RemovableHandle]:
    """Let the layers with running statistics tell the engine that these were loaded."""
    return [norm.register_load_state_dict_post_hook(Reload(engine)) for norm in norms_of(model)]


def hook_steps(optimizer: Optimizer, casting: object) -> list[RemovableHandle]:
    """Keep shadow weights right, whoever calls ``optimizer.step()``.

    A fused optimizer of halfpeak's writes them in its step. Before the step of another they are let go, because it may need
    their memory, and writes weights perhaps without their version counters showing it; and after it those that its closure
    has made.
    """
    shadows = casting.shadows if isinstance(casting, OpCasts) else None
    if shadows is None:
        return []
    if isinstance(optimizer, FusedOptimizer):
        return _follow(optimizer, shadows)

    def forget(optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                shadows.drop(parameter)
        shadows.drop_unwritten()

    return [optimizer.register_step_pre_hook(forget), optimizer.register_step_post_hook(forget)]


def _follow(optimizer: FusedOptimizer, shadows: ShadowWeights) -> list[RemovableHandle]:
    homes = shadows.homes()
    optimizer.follow(homes)

    def settle(optimizer: Optimizer, *_: object) -> None:
        homes.lows_of(targets_of(optimizer))
        shadows.drop_unwritten()

    return [
        optimizer.register_step_pre_hook(settle),
        optimizer.register_step_post_hook(settle),
        _Unfollow(optimizer, shadows, homes),
    ]


def hook_forward(model: nn.Module, engine: Engine) -> RemovableHandle:
    """Let the engine catch up before anything else that a forward pass of the model does."""
    handle = model.register_forward_pre_hook(CatchUp(engine), prepend=True)
    hooks = model._forward_pre_hooks
    # The compiler of torch 2.11 counts hooks in the order in which they were put in, whichever goes first.
    for key in list(hooks):
        hooks[key] = hooks.pop(key)
    return handle


class _Unfollow(RemovableHandle):
    """Takes an optimizer's shadow weights from it, like a hook."""

    def __init__(self, optimizer: FusedOptimizer, shadows: ShadowWeights, homes: Homes) -> None:
        super().__init__(OrderedDict())
        self._optimizer = weakref.ref(optimizer)
        self._shadows = shadows
        self._homes = homes

    def remove(self) -> None:
        """Do that."""
        self._shadows.leave(self._homes)
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.follow(None)


class _Weak:
    """A hook that holds its engine weakly. A deep copy or a pickle of the model lets go of it."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = None if engine is None else weakref.ref(engine)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Weak:
        return type(self)(None)

    def __reduce__(self) -> tuple[type[_Weak], tuple[None]]:
        return type(self), (None,)


class CatchUp(_Weak):
    """A forward pre-hook that lets the engine put right what an exception in ``optimizer.step()`` has left behind.

    Afterwards would be too late: a parameter must not change between forward and backward.
    """

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Catch up; a compiled forward pass leaves it to the next backward pass."""
        if self._engine is None or is_compiling():
            return
        engine = self._engine()
        if engine is not None:
            engine.catch_up()


class Reload(_Weak):
    """A hook after ``load_state_dict`` of a layer with running statistics: a skipped step goes back to the loaded ones."""

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Remember them."""
        engine = None if self._engine is None else self._engine()
        if engine is not None:
            engine.buffers.reload()
