"""The hooks on ``Optimizer.step``: by them a step of user code enters and leaves the order of a prepared step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfpeak.core.errors import OrderError
from halfpeak.core.optimizer_state import are_params_of, params_of
from halfpeak.parts.scaled_pass import refuse_in_pass
from halfpeak.parts.window import Window

Closure = Callable[[], Any]
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class StepOwner(Protocol):
    """What prepared an optimizer and takes part in its steps: an engine, a run of ``amp``, a hook of a runner."""

    def before_step(self, window: Window, closure: Closure | None) -> Closure | None:
        """Before the optimizer's own code: decide the step; returns what the optimizer calls instead of ``closure``."""
        ...

    def after_step(self, window: Window) -> None:
        """After the optimizer's own code. Called once more where the step of a class calls that of its base class."""
        ...


class StepHooks:
    """The hooks before and after each step of one optimizer, and of optimizers inside it that step the same parameters.

    No method of the optimizer is replaced. The reference to the owner is weak.
    """

    def __init__(self, window: Window, owner: StepOwner) -> None:
        self.window = window
        self._owner = weakref.ref(owner)

    @property
    def owner(self) -> StepOwner:
        """The engine, run or hook.

        Raises:
            OrderError: it does not exist any more, so nothing would publish the masters or look at the gradients.
        """
        owner = self._owner()
        if owner is None:
            raise OrderError(
                "the engine that prepared this optimizer does not exist any more, so a step would not reach the model; keep a "
                "reference to the engine, or call engine.remove() when you are done with it"
            )
        return owner

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> StepArguments | None:
        """Let the owner decide, and wrap a closure."""
        refuse_in_pass("optimizer.step()")
        closure, rebuild = take_closure(args, kwargs)
        wrapped = self.owner.before_step(self.window, closure)
        return None if wrapped is None else rebuild(wrapped)

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Let the owner publish masters and move the loss scale."""
        self.owner.after_step(self.window)


def hook_steps(window: Window, owner: StepOwner) -> list[RemovableHandle]:
    """Register the hooks on an optimizer, and on optimizers inside it (Lookahead, SAM) that step the same parameters."""
    hooks, optimizer = StepHooks(window, owner), window.optimizer
    members = params_of(optimizer)
    inner = [
        value
        for value in vars(optimizer).values()
        if isinstance(value, Optimizer) and are_params_of(value, members)
    ]
    return [
        handle
        for one in (*inner, optimizer)
        for handle in (
            one.register_step_pre_hook(hooks.before_step),
            one.register_step_post_hook(hooks.after_step),
        )
    ]


def hooks_of(optimizer: Optimizer) -> StepHooks | None:
    """The hooks of a prepared optimizer, or None."""
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, StepHooks)), None)


class SkippedStep:
    """A call of ``optimizer.step()`` that is to change nothing: it has no gradients while it runs.

    torch's optimizers then change neither parameters nor state, and schedulers still see a step. Many other optimizers count
    their steps in the groups, so these values are put back.
    """

    def __init__(self, window: Window) -> None:
        self._optimizer = window.optimizer
        for main in window.mains:
            main.grad = None
        self._before = [
            {
                key: value.detach().clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def undo_counts(self) -> None:
        """After the call, restore the settings and counters of the groups."""
        for group, values in zip(self._optimizer.param_groups, self._before, strict=False):
            for key in group.keys() - values.keys() - {"params"}:
                del group[key]
            for key, value in values.items():
                now = group.get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and now.shape == value.shape:
                    with torch.no_grad():
                        now.copy_(value)  # Other code may refer to the tensor, as to a learning rate.
                else:
                    group[key] = value


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether the optimizer's own kernel can skip, so that the host need not read ``found_inf``."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if isinstance(optimizer, torch.optim.SGD):
        # The first fused step allocates momentum buffers, and a kernel that skips leaves them unwritten.
        return all(
            not group["momentum"] or "momentum_buffer" in optimizer.state.get(parameter, {})
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )
    return True


def hand_over_found_inf(optimizer: Optimizer, found_inf: Tensor | bool) -> None:
    """Make the optimizer's coming step do nothing if ``found_inf`` is 1.  # f32[] or bool"""
    # A bool becomes a tensor on the CPU, whatever the default device is.
    flag = (
        found_inf
        if isinstance(found_inf, Tensor)
        else torch.tensor(float(found_inf), dtype=torch.float32, device="cpu")
    )
    optimizer.__dict__.update(found_inf=flag, grad_scale=None)


def take_back_found_inf(optimizer: Optimizer) -> None:
    """Undo :func:`hand_over_found_inf`."""
    for name in ("found_inf", "grad_scale"):
        optimizer.__dict__.pop(name, None)


def take_closure(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Closure | None, Callable[[Closure], StepArguments]]:
    """The closure among the arguments of ``Optimizer.step`` (``args[0]`` is the optimizer), and how to replace it."""
    if len(args) > 1:
        return args[1], lambda closure: ((args[0], closure, *args[2:]), dict(kwargs))
    return kwargs.get("closure"), lambda closure: (tuple(args), {**kwargs, "closure": closure})
