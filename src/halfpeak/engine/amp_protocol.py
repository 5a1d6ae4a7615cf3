"""What passes between an optimizer's ``step`` and its callers: closures, and the attributes by which fused kernels skip."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Closure = Callable[[], Any]
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether the optimizer's own kernel can skip, so that the host need not know found_inf."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if isinstance(optimizer, torch.optim.SGD):
        # Its first fused step allocates momentum buffers before the kernel decides to leave them unwritten.
        return all(
            not group["momentum"] or "momentum_buffer" in optimizer.state.get(parameter, {})
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )
    return True


def hand_over_found_inf(optimizer: Optimizer, found_inf: Tensor | bool) -> None:
    """Let the optimizer's coming step do nothing if found_inf is 1.  # f32[] or bool"""
    # What the host knows stays there, wherever new tensors go by default.
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
    """The closure in the arguments of ``Optimizer.step`` (``args[0]`` is the optimizer), and how to put in another."""
    if len(args) > 1:
        return args[1], lambda closure: ((args[0], closure, *args[2:]), dict(kwargs))
    return kwargs.get("closure"), lambda closure: (args, {**kwargs, "closure": closure})
