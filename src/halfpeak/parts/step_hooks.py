"""The hooks on ``Optimizer.step``: a step of user code enters and leaves the order of a prepared step, or is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from halfpeak.core.dtypes import LOW, is_low
from halfpeak.core.errors import OrderError, StateError
from halfpeak.core.optimizer_state import are_params_of, params_of
from halfpeak.parts.parts import live_parts
from halfpeak.parts.scaled_pass import refuse_in_pass
from halfpeak.parts.window import Window

_T = TypeVar("_T")

Closure = Callable[[], Any]
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class StepOwner(Protocol):
    """What prepared an optimizer and takes part in the steps of user code: a run of ``amp``, an ``FP16_Optimizer``."""

    def before_step(self, window: Window, closure: Closure | None) -> Closure | None:
        """Before the optimizer's own code: decide the step; returns what the optimizer calls instead of ``closure``."""
        ...

    def after_step(self, window: Window) -> None:
        """After the optimizer's own code. Called once more where the step of a class calls that of its base class."""
        ...


class StepHooks:
    """The hooks before and after each step of one optimizer, and of optimizers inside it that step the same parameters.

    No method of the optimizer is replaced. The reference to the owner is weak; without it a step raises an OrderError.
    """

    def __init__(self, window: Window, owner: StepOwner) -> None:
        self.window = window
        self._owner = weakref.ref(owner)

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> StepArguments | None:
        """Let the owner decide, and wrap a closure."""
        refuse_in_pass("optimizer.step()")
        closure, rebuild = take_closure(args, kwargs)
        wrapped = _existing(self._owner).before_step(self.window, closure)
        return None if wrapped is None else rebuild(wrapped)

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Let the owner publish masters and move the loss scale."""
        _existing(self._owner).after_step(self.window)


class StepRefusal:
    """The hook before each step of an optimizer that an engine alone steps.

    Args:
        window: of the optimizer.
        refuse: a method that raises if the step is not its object's own: it gets the window, and whether there is a closure.
            The reference is weak; without it a step raises an OrderError.
    """

    def __init__(self, window: Window, refuse: Callable[[Window, bool], None]) -> None:
        self._window, self._refuse = window, weakref.WeakMethod(refuse)

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Let the engine refuse."""
        _existing(self._refuse)(
            self._window, (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        )


def hook_steps(window: Window, owner: StepOwner) -> list[RemovableHandle]:
    """Let an owner take part in the steps of an optimizer."""
    _refuse_strangers()
    hooks = StepHooks(window, owner)
    return [
        handle
        for one in _with_inner(window.optimizer)
        for handle in (
            one.register_step_pre_hook(hooks.before_step),
            one.register_step_post_hook(hooks.after_step),
        )
    ]


def refuse_steps(window: Window, refuse: Callable[[Window, bool], None]) -> list[RemovableHandle]:
    """Let a method refuse the steps of an optimizer, see :class:`StepRefusal`; refuse an engine's state as its own."""
    _refuse_strangers()
    hook = StepRefusal(window, refuse)
    handles = [one.register_step_pre_hook(hook) for one in _with_inner(window.optimizer)]
    return [*handles, window.optimizer.register_load_state_dict_pre_hook(_refuse_engine_state)]


def _refuse_engine_state(optimizer: Optimizer, state: Any) -> None:
    if isinstance(state, Mapping) and "optimizers" in state and "param_groups" not in state:
        raise StateError(
            "optimizer.load_state_dict() was given the state of an engine, which has those of all its optimizers; write "
            "engine.load_state_dict(state)"
        )


def _with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers inside one (Lookahead, SAM) that step the same parameters, and itself."""
    members = params_of(optimizer)
    inside = [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]
    return [*(one for one in inside if are_params_of(one, members)), optimizer]


def is_hooked(optimizer: Optimizer) -> bool:
    """Whether an optimizer was prepared."""
    return any(map(is_own_hook, optimizer._optimizer_step_pre_hooks.values()))


def is_own_hook(hook: object) -> bool:
    """Whether a hook on the step of an optimizer is one of this module."""
    return (
        hook is _refuse_stranger
        or isinstance(hook, StepRefusal)
        or isinstance(getattr(hook, "__self__", None), StepHooks)
    )


def _refuse_strangers() -> None:
    """From now on refuse the steps of optimizers that are not prepared, but step a prepared model."""
    if _refuse_stranger not in _global_optimizer_pre_hooks.values():
        register_optimizer_step_pre_hook(_refuse_stranger)


def _refuse_stranger(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before a step of any optimizer of the process.

    A stranger may step float32 parameters of a prepared model in a plain loop.

    Raises:
        OrderError: it steps gradients of a scaled pass, in which nothing looks for overflows, or low-precision weights past
            their masters.
    """
    if is_hooked(optimizer) or is_compiling():
        return
    stepped, live = params_of(optimizer), live_parts()
    if any(window.reference() is optimizer for parts in live for window in parts.windows):
        return
    ids = set(map(id, stepped))
    has_low = not LOW.isdisjoint(map(attrgetter("dtype"), stepped))
    for parts in live:
        prepared = [
            one for window in parts.windows if (one := window.reference()) is not None and is_hooked(one)
        ]
        if not prepared or parts.is_stepping or any(_share_groups(one, optimizer) for one in prepared):
            continue  # an API that calls the steps itself; or an optimizer inside or around a prepared one
        is_scaled = any(
            (window.losses or window.held) and not window.ids.isdisjoint(ids) for window in parts.windows
        )
        if is_scaled or (has_low and parts.policy.masters and _steps_low(stepped, parts.names())):
            raise OrderError(
                f"this {type(optimizer).__name__} steps parameters of a prepared model, but was not prepared itself: nothing "
                "would look for overflows, and low-precision weights would be stepped past their masters; write "
                "halfpeak.prepare(model, [first, second]), with amp amp.initialize(model, [first, second]); or "
                "engine.remove() before a plain loop"
            )


def _steps_low(parameters: Iterable[Tensor], ids: Container[int]) -> bool:
    return any(is_low(one) and one.grad is not None and id(one) in ids for one in parameters)


def _share_groups(one: Optimizer, other: Optimizer) -> bool:
    return not {id(group) for group in one.param_groups}.isdisjoint(map(id, other.param_groups))


def _existing(reference: Callable[[], _T | None]) -> _T:
    """What a weak reference refers to.

    Raises:
        OrderError: it does not exist any more, so nothing would publish the masters or look at the gradients.
    """
    found = reference()
    if found is None:
        raise OrderError(
            "the engine that prepared this optimizer does not exist any more, so a step would not reach the model; keep a "
            "reference to the engine, or call engine.remove() when you are done with it"
        )
    return found


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


@contextmanager
def passing_found_inf(optimizer: Optimizer, found_inf: Tensor | bool) -> Generator[None]:
    """Context in which a step of the optimizer does nothing if ``found_inf`` is 1: its kernels read it.  # f32[] or bool"""
    # A bool becomes a tensor on the CPU, whatever the default device is.
    flag = (
        found_inf
        if isinstance(found_inf, Tensor)
        else torch.tensor(float(found_inf), dtype=torch.float32, device="cpu")
    )
    optimizer.__dict__.update(found_inf=flag, grad_scale=None)
    try:
        yield
    finally:
        for name in ("found_inf", "grad_scale"):
            optimizer.__dict__.pop(name, None)


def take_closure(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Closure | None, Callable[[Closure], StepArguments]]:
    """The closure among the arguments of ``Optimizer.step`` (``args[0]`` is the optimizer), and how to replace it."""
    if len(args) > 1:
        return args[1], lambda closure: ((args[0], closure, *args[2:]), dict(kwargs))
    return kwargs.get("closure"), lambda closure: (tuple(args), {**kwargs, "closure": closure})
