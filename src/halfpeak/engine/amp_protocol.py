"""What is passed to ``Optimizer.step``: closures, and attributes ``found_inf`` and ``grad_scale`` for fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Closure = Callable[[], Any]
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


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
