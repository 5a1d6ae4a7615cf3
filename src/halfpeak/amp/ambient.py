"""Per-operation casts for the whole thread, as scripts written for apex expect at O1.

Such scripts compute losses outside the model, where casts that end with ``forward`` would not apply. So the casts of the
latest O1 or O4 run stay on until its models are deleted. If several runs with different casts are alive, each model
runs its ``forward`` under the casts of its own run.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from halfpeak.amp.registration import make_casts
from halfpeak.amp.run import Run
from halfpeak.amp.session import _amp_state
from halfpeak.casting import suspend
from halfpeak.casting.casts import OpCasts, casts_on
from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.torch_compat import traced_inline
from halfpeak.parts.step_hooks import take_closure


@contextmanager
def disable_casts() -> Generator[None]:
    """Run the block without casts on this thread, also in models that enter casts of their own.

    Nests, restores the casts after an exception, and does nothing where no casts are on.
    """
    _amp_state.suspended.depth += 1
    try:
        with suspend.disable_casts():
            yield
    finally:
        _amp_state.suspended.depth -= 1


class Handle:
    """Switches casts on and off for the thread. ``amp._amp_state.handle`` is the handle of the active casts."""

    def __init__(self, casts: OpCasts | None, *, cache: bool = True, verbose: bool = False) -> None:
        self.casts = casts
        self.has_cache = cache
        self.verbose = verbose
        self._activate()

    def is_active(self) -> bool:
        """Whether these casts are on."""
        return _amp_state.handle is self

    def _activate(self) -> None:
        if self.casts is None:
            return
        if _amp_state.handle is not None:
            _amp_state.handle._deactivate()
        self.casts.install()
        _amp_state.handle = self

    def _deactivate(self) -> None:
        if self.casts is not None and self.is_active():
            self.casts.uninstall()
            _amp_state.handle = None

    def _clear_cache(self) -> None:
        if self.casts is not None:
            self.casts.clear_cache()

    def _disable_casts(self) -> AbstractContextManager[None]:
        return disable_casts()


def init(
    enabled: bool = True,
    loss_scale: Any = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype = torch.float16,
) -> Handle:
    """Switch per-operation casts on for this thread, without a model; apex's predecessor of ``initialize``.

    Args:
        enabled: False returns a handle that does nothing.
        loss_scale: checked, and without effect: it was that of ``handle.wrap_optimizer``, which fails in apex 25.04.
        enable_caching: share the cast of a weight among its uses.
        verbose: print every cast.
        allow_banned: compute binary cross-entropy of low-precision input in float32 instead of raising an error.
        patch_type: the low-precision dtype of the casts.
    """
    if loss_scale != "dynamic" and not isinstance(loss_scale, (int, float)):
        raise ConfigError(f"loss_scale={short_repr(loss_scale)} must be 'dynamic' or a number")
    if not enabled:
        return Handle(None)
    casts = make_casts(patch_type, 2 if verbose else 0, cache=enable_caching, allow_banned=allow_banned)
    return Handle(casts, cache=enable_caching, verbose=verbose)


def enter_ambient(run: Run) -> None:
    """Switch the thread to the casts of a new run; models of other runs keep their own casts in ``forward``."""
    if run.casts is None:
        return
    handle = Handle(run.casts, verbose=run.verbosity == 2)
    for model in run.parts.models:
        weakref.finalize(model, _end_if_unused, weakref.ref(handle))
    _amp_state.models.update(dict.fromkeys(run.parts.models, handle))
    _enter_own_casts()


def keep_casts_out(models: Iterable[nn.Module]) -> None:
    """Make models for which amp is disabled compute without casts, whatever casts are on for the thread."""
    _amp_state.models.update(dict.fromkeys(models))
    _enter_own_casts()


def casts_in_backward(run: Run | None) -> AbstractContextManager[None]:
    """Return a context for a backward pass: recomputation in it is cast like the forward pass of ``run``.

    Args:
        run: the run of the loss; None if amp is disabled for the loss.
    """
    handle, casts = _amp_state.handle, None if run is None else run.casts
    if handle is None or handle.casts is casts or _amp_state.suspended.depth:
        return nullcontext()
    return casts_on(casts)


def _enter_own_casts() -> None:
    """Make every model enter its own casts, if the casts of the thread are not right for all models."""
    known = list(_amp_state.models.items())
    if _amp_state.handle is not None and any(own is not _amp_state.handle for _, own in known):
        for model, own in known:
            _keep_own_casts(model, own)


def _end_if_unused(handle: weakref.ref[Handle]) -> None:
    """Switch off casts whose last model is deleted, and switch on the casts of the latest live model, if any."""
    ended, alive = handle(), [own for own in _amp_state.models.values() if own is not None]
    if ended is None or not ended.is_active() or ended in alive:
        return
    ended._deactivate()
    if alive:
        alive[-1]._activate()


def suspend_casts_in_step(run: Run) -> None:
    """Run every ``optimizer.step()`` without casts, because matrix products in an update must run in float32.

    A step with a closure keeps the casts, because the closure computes a loss. After a step that raises, they are on again
    from the next forward pass of a model of the run.
    """
    if run.casts is None:
        return
    for optimizer in run.parts.optimizers:
        optimizer.register_step_pre_hook(_suspend)
        optimizer.register_step_post_hook(_resume)


def _suspend(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if take_closure(args, kwargs)[0] is None:
        suspend.suspend(optimizer)


def _resume(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if take_closure(args, kwargs)[0] is None:
        suspend.resume(optimizer)


class _OwnCasts:
    """Forward hooks of a model that enter the casts of its own run, and leave them even if ``forward`` raises.

    A deep copy enters the same casts; a pickle computes with the active ones.

    Attributes:
        handle: the handle of the model's casts; None disables casts.
    """

    def __init__(self, handle: Handle | None) -> None:
        self.handle = handle
        self._open: list[AbstractContextManager[Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _OwnCasts:
        return _OwnCasts(self.handle)

    def __reduce__(self) -> tuple[Any, ...]:
        return _OwnCasts if self.handle is None else _NoOwnCasts, (None,)

    @traced_inline
    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Enter the casts before ``forward``."""
        casts = None if _amp_state.suspended.depth or self.handle is None else self.handle.casts
        scope = suspend.disable_casts() if casts is None else casts
        scope.__enter__()
        self._open.append(scope)

    @traced_inline
    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Leave the casts after ``forward``, even if it raised."""
        if self._open:
            self._open.pop().__exit__(None, None, None)


class _NoOwnCasts(_OwnCasts):
    """Of a model from a pickle: it computes with the active casts."""

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Do nothing."""


def _keep_own_casts(model: nn.Module, handle: Handle | None) -> None:
    for hook in model._forward_pre_hooks.values():
        own = getattr(hook, "__self__", None)
        if type(own) is _OwnCasts:
            own.handle = handle
            return
    own = _OwnCasts(handle)
    model.register_forward_pre_hook(own.enter, prepend=True)
    model.register_forward_hook(own.leave, always_call=True)
