"""A call of ``Optimizer.step``: what it is given (a closure, ``found_inf``), and whether it has changed anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfpeak.core.errors import LossScaleCollapse
from halfpeak.core.optimizer_state import row_of
from halfpeak.engine.gradients.fused_grads import FusedGrads
from halfpeak.fused.base import FusedOptimizer

Closure = Callable[[], Any]
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class StepCall(NamedTuple):
    """A call of ``optimizer.step()`` that has begun.

    Attributes:
        found_inf: whether to skip, or a tensor for an optimizer whose own kernel skips; None while a user-called step
            is undecided.  # f32[] or bool
        by_engine: called by ``engine.step()``, not by user code.
        has_closure: the optimizer evaluates the loss itself.
        keep_gradients: whether parameters without a master keep their gradients.
        fused: gradients that a fused optimizer reads where they are, or None.
        progress: snapshot from before the optimizer's own code; None before that, and with a closure.
        is_cleared: whether the step left no gradients.
        collapse: raised at the end of the step, because it is skipped and the loss scale cannot fall any further; or None.
        groups: settings and counters in the optimizer's groups before a skipped step, or None.
        inner: the optimizer inside the prepared one whose step user code called, or None.
    """

    found_inf: Tensor | bool | None
    by_engine: bool = False
    has_closure: bool = False
    keep_gradients: bool = False
    fused: FusedGrads | None = None
    progress: StepProgress | None = None
    is_cleared: bool = False
    collapse: LossScaleCollapse | None = None
    groups: list[dict[str, Any]] | None = None
    inner: Optimizer | None = None


class StepProgress:
    """A snapshot before a step, to tell whether the step has changed parameters.

    Args:
        changing: the parameters that have a gradient.
        reads_elsewhere: whether the step reads gradients from elsewhere than ``.grad``.
    """

    def __init__(self, optimizer: Optimizer, changing: Sequence[Tensor], *, reads_elsewhere: bool) -> None:
        self._has_nothing_to_do = not changing and not reads_elsewhere
        self._count = _steps_of(optimizer)
        self._changing = list(changing) if self._count is None else []
        self._first_of_groups = _first_of_each_group(optimizer) if self._changing else []
        self._before = self._versions(optimizer)

    def has_mutated(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has changed parameters; also true if it had nothing to change."""
        return (
            self._has_nothing_to_do
            or _steps_of(optimizer) != self._count
            or self._versions(optimizer) != self._before
        )

    def _versions(self, optimizer: Optimizer) -> tuple[list[int], list[object]]:
        """The version counters of the parameters and of one ``step`` tensor per group; a missing ``step`` counts as 0.

        torch's fused kernels raise only the versions of ``step`` tensors. One kernel steps a whole group.
        """
        steps = [row_of(optimizer, parameter).get("step", 0) for parameter in self._first_of_groups]
        versions = list(map(_VERSION, self._changing))
        return versions, [step._version if isinstance(step, Tensor) else step for step in steps]


def _steps_of(optimizer: Optimizer) -> int | None:
    """How many steps an optimizer of :mod:`halfpeak.fused` has taken; None for any other optimizer."""
    return optimizer.num_steps if isinstance(optimizer, FusedOptimizer) else None


def _first_of_each_group(optimizer: Optimizer) -> list[Tensor]:
    """The first parameter with a gradient of each group that has one."""
    firsts = (
        next((p for p in group["params"] if p.grad is not None), None) for group in optimizer.param_groups
    )
    return [parameter for parameter in firsts if parameter is not None]


_VERSION: Final = attrgetter("_version")


def group_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings and counters in the optimizer's groups; tensors are copied."""
    return [
        {
            key: value.detach().clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def restore_group_values(optimizer: Optimizer, before: Sequence[dict[str, Any]]) -> None:
    """Undo what a step without gradients has counted: many optimizers count their steps in the groups."""
    for group, values in zip(optimizer.param_groups, before, strict=False):
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
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Closure | None, Callable[[Closure], StepArguments]]:
    """The closure among the arguments of ``Optimizer.step`` (``args[0]`` is the optimizer), and how to replace it."""
    if len(args) > 1:
        return args[1], lambda closure: ((args[0], closure, *args[2:]), dict(kwargs))
    return kwargs.get("closure"), lambda closure: (args, {**kwargs, "closure": closure})
