"""The hooks on ``Optimizer.step``, through which the engine and user code step a prepared optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.hooks import RemovableHandle

from halfpeak.core.optimizer_state import are_params_of, params_of
from halfpeak.engine.gradients.window import Scaled
from halfpeak.engine.optimizer import PreparedOptimizer
from halfpeak.engine.step_call import (
    Closure,
    StepArguments,
    StepCall,
    StepProgress,
    group_values,
    hand_over_found_inf,
    restore_group_values,
    take_closure,
)


class StepCallbacks(Protocol):
    """What the hooks call. Implementations must not store the :class:`PreparedOptimizer`, which would be a cycle."""

    def begin_user_step(self, one: PreparedOptimizer, call: StepCall, *, has_closure: bool) -> StepCall:
        """``call``, a step that user code called, with the decision whether to skip it."""
        ...

    def wrap_closure(self, one: PreparedOptimizer, closure: Closure) -> Closure:
        """The closure that the optimizer calls instead of ``closure``."""
        ...

    def end_step(self, one: PreparedOptimizer) -> None:
        """End a step that the optimizer has taken or skipped."""
        ...


class StepHooks:
    """The hooks before and after each step of one prepared optimizer, and before its state is loaded.

    No method of the optimizer is replaced. To skip a step, :meth:`before_step` sets the gradients to None: torch's
    optimizers then change neither parameters nor state, and schedulers still see a step. An optimizer that takes
    ``found_inf`` is given it instead. :meth:`after_step` ends the step.

    Only the optimizer refers to this object.
    """

    def __init__(self, prepared: PreparedOptimizer, callbacks: StepCallbacks) -> None:
        self.prepared, self._callbacks = prepared, callbacks

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> StepArguments | None:
        """Decide a step that user code called; then skip the step, or wrap its closure."""
        one = self.prepared
        one.ended = None
        closure, rebuild = take_closure(args, kwargs)
        # Set before the decision: if the decision raises, recover() finds a running step and discards it.
        call = one.running or StepCall(None)
        one.running = call = call._replace(progress=None) if call.progress is not None else call
        if call.found_inf is None:
            one.running = call = self._callbacks.begin_user_step(one, call, has_closure=closure is not None)
        found_inf = call.found_inf
        assert found_inf is not None
        reads_elsewhere = call.fused is not None
        if closure is not None:
            # Take over weights that were clamped or loaded. Without a closure begin_step() has done so.
            one.masters.refresh()
        indices = one.cached_table().master_indices
        one.masters.refresh_by_value(indices)
        if call.fused is not None and call.fused.is_partial:
            # User code may have written masters that the step leaves out, and so their weights.
            one.masters.publish_written()
        if closure is not None:
            one.running = call._replace(has_closure=True)
            one.masters.mark_stepped(indices)
            return rebuild(self._callbacks.wrap_closure(one, closure))
        if isinstance(found_inf, Tensor) or reads_elsewhere:
            hand_over_found_inf(optimizer, found_inf)
        elif found_inf:
            for parameter in one.table().main_params:
                parameter.grad = None
            if call.groups is None:  # A step that calls the step of its base class comes here twice.
                call = call._replace(groups=group_values(optimizer))
        changing = [] if reads_elsewhere else one.pairs_to_step().with_gradient()
        progress = StepProgress(optimizer, changing, reads_elsewhere=reads_elsewhere)
        one.running = call._replace(progress=progress)
        if found_inf is not True:
            one.masters.mark_stepped(indices)
        return None

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """End the step."""
        call = self.prepared.running or self.prepared.ended
        if call is not None and call.groups is not None:
            restore_group_values(optimizer, call.groups)
        self._callbacks.end_step(self.prepared)

    def before_inner_step(
        self, inner: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> StepArguments | None:
        """Before a step of an optimizer inside the prepared one.

        If user code calls it by itself (SAM's second step), it counts as a step of the prepared optimizer, and the
        hooks of that one run.
        """
        running, optimizer = self.prepared.running, self.prepared.optimizer
        if running is not None and running.inner is not inner:
            return None
        self.prepared.running = running or StepCall(None, inner=inner)
        given: StepArguments = ((optimizer, *args[1:]), dict(kwargs))
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            given = hook(optimizer, *given) or given
        return (inner, *given[0][1:]), given[1]

    def after_inner_step(self, inner: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """After a step of an optimizer inside the prepared one."""
        running, optimizer = self.prepared.running, self.prepared.optimizer
        if running is None or running.inner is inner:
            for hook in list(optimizer._optimizer_step_post_hooks.values()):
                hook(optimizer, (optimizer, *args[1:]), dict(kwargs))

    def before_load(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Give frozen parameters with saved state a master now: torch casts loaded state to the parameter's dtype."""
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        trained = {
            id(p) for p, name in zip(params_of(optimizer), names, strict=False) if name in state_dict["state"]
        }
        one = self.prepared
        one.masters.adopt(optimizer, move_grads=not isinstance(one.window, Scaled), trained=trained)


def hook_steps(prepared: PreparedOptimizer, callbacks: StepCallbacks) -> list[RemovableHandle]:
    """Register the hooks on the optimizer, and on optimizers inside it that step the same parameters."""
    hooks, optimizer = StepHooks(prepared, callbacks), prepared.optimizer
    parameters = params_of(optimizer)
    inner = [
        value
        for value in vars(optimizer).values()
        if isinstance(value, Optimizer) and are_params_of(value, parameters)
    ]
    return [
        *(one.register_step_pre_hook(hooks.before_inner_step) for one in inner),
        *(one.register_step_post_hook(hooks.after_inner_step) for one in inner),
        optimizer.register_step_pre_hook(hooks.before_step),
        optimizer.register_step_post_hook(hooks.after_step),
        optimizer.register_load_state_dict_pre_hook(hooks.before_load),
    ]


def prepared_of(optimizer: Optimizer) -> PreparedOptimizer | None:
    """The :class:`PreparedOptimizer` of an optimizer, or None."""
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    return next((owner.prepared for owner in owners if isinstance(owner, StepHooks)), None)


def has_later_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks of other code run after the engine's post-hook."""
    hooks = [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]
    return not hooks or not isinstance(getattr(hooks[-1], "__self__", None), StepHooks)
