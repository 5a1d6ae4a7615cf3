"""The hooks that an engine puts on its models."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from halfpeak.casting.dtype_errors import explain_errors
from halfpeak.casting.modules import hook_boundary, hook_kept
from halfpeak.casting.suspend import resume_installed, suspend_installed
from halfpeak.core.errors import StateError
from halfpeak.core.policy import Policy
from halfpeak.core.torch_compat import traced_inline
from halfpeak.parts.batch_norm import BatchNormStats, norms_of
from halfpeak.parts.pairs import Pairs
from halfpeak.parts.state_dict_hooks import hook_state_dict


def hook_model(model: nn.Module, policy: Policy, pairs: Pairs) -> list[RemovableHandle]:
    """Register the hooks that the policy requires on a model."""
    handles = [*hook_boundary(model, policy), *hook_kept(model, policy), *hook_no_casts(model, policy)]
    handles.append(explain_errors(model, policy))
    if policy.param is not None or policy.masters:
        handles += hook_state_dict(model, pairs)
    return handles


def hook_no_casts(model: nn.Module, policy: Policy) -> list[RemovableHandle]:
    """In a model without per-operation casts, suspend those that another engine installed for the whole thread."""
    if policy.per_op:
        return []
    return [
        model.register_forward_pre_hook(suspend_installed),
        model.register_forward_hook(resume_installed, prepend=True, always_call=True),
    ]


def hook_loads(model: nn.Module, stats: BatchNormStats) -> list[RemovableHandle]:
    """Report the loading of running statistics to ``stats``, so that a skipped step restores the loaded values."""
    return [norm.register_load_state_dict_post_hook(AfterLoad(stats.after_load)) for norm in norms_of(model)]


def refuse_engine_state(model: nn.Module) -> RemovableHandle:
    """Refuse the state of an engine in ``load_state_dict`` of its model, which with ``strict=False`` would load nothing."""
    return model.register_load_state_dict_pre_hook(_refuse_engine_state)


def _refuse_engine_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if not prefix and "models" in state and "optimizers" in state:
        raise StateError(
            "model.load_state_dict() was given the state of an engine, which has those of all its models; write "
            "engine.load_state_dict(state), or model.load_state_dict(state['models'][0]) for the weights alone"
        )


def hook_forward(model: nn.Module, before_forward: Callable[[nn.Module], None]) -> RemovableHandle:
    """Call the method ``before_forward`` with the model before all else in its forward pass. The reference is weak."""
    handle = model.register_forward_pre_hook(BeforeForward(before_forward), prepend=True)
    hooks = model._forward_pre_hooks
    # The compiler of torch 2.11 numbers hooks in the order of insertion, not in the order in which they run.
    for key in list(hooks):
        hooks[key] = hooks.pop(key)
    return handle


def owner_of(model: nn.Module) -> object:
    """The object whose method :func:`hook_forward` registered on the model, or None."""
    hooks = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, BeforeForward)]
    return hooks[0].owner if hooks else None


def own_hooks(module: nn.Module) -> list[Any]:
    """The hooks that halfpeak has put on a module, whichever part of it."""
    return [hook for name in _HOOKS for hook in vars(module)[name].values() if _is_own(hook)]


def remove_own_hooks(module: nn.Module) -> None:
    """Remove :func:`own_hooks` from a copy of a prepared module, of whose hooks nobody has the handles."""
    for name, options in _HOOKS.items():
        hooks = vars(module)[name]
        for key in [key for key, hook in hooks.items() if _is_own(hook)]:
            for entries in (hooks, *(vars(module)[option] for option in options)):
                entries.pop(key, None)


def _is_own(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("halfpeak.")


_HOOKS: Final = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_state_dict_hooks": (),
    "_load_state_dict_pre_hooks": (),
    "_load_state_dict_post_hooks": (),
}
"""The attributes of a module with its hooks, and those with their options."""


class _WeakHook:
    """A hook with a weak reference to a bound method. A deep copy or a pickle of the hook does nothing when called."""

    def __init__(self, method: Callable[..., None] | None) -> None:
        self._method: weakref.WeakMethod[Any] | None = None if method is None else weakref.WeakMethod(method)

    def __deepcopy__(self, memo: dict[int, Any]) -> _WeakHook:
        return type(self)(None)

    def __reduce__(self) -> tuple[type[_WeakHook], tuple[None]]:
        return type(self), (None,)

    @property
    def owner(self) -> object:
        """The object of the method, or None if it does not exist any more."""
        method = None if self._method is None else self._method()
        return None if method is None else method.__self__

    def _call(self, *args: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(*args)


class BeforeForward(_WeakHook):
    """A forward pre-hook before which weights and masters agree: they must not change between forward and backward."""

    @traced_inline
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Call the method, except in a compiled or traced forward pass: ``engine.forward()`` is outside of it."""
        if self._method is None or is_compiling() or torch.jit.is_tracing():
            return
        self._call(module)


class AfterLoad(_WeakHook):
    """A hook after ``load_state_dict`` of a layer with running statistics."""

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Call the method, which saves the loaded statistics."""
        self._call()
