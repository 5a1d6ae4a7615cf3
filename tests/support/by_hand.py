"""Mixed precision in plain torch, for tests that compare whole trainings to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from support.snapshot import values


@dataclass
class History:
    """The result of a run: everything that training has changed, the scale after each step, and which steps moved."""

    values: list[Any] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    stepped: list[bool] = field(default_factory=list)


def train_by_hand(
    net: nn.Module,
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    loss_of: Callable[[int], Tensor],
    steps: int,
    *,
    low: torch.dtype | None = None,
    exact: Iterable[Tensor] | None = None,
    scale: float = 1.0,
    around: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
) -> History:
    """Unscale into float32 masters; step and copy them back, or skip: halve the scale, and put the buffers back.

    Args:
        net: its parameters of the dtype ``low`` have masters.
        make_optimizer: from what is stepped to the optimizer.
        loss_of: from the number of a step to its loss.
        steps: their number.
        low: None for a float32 loop.
        exact: the start values of the masters; None starts from the parameters.
        scale: of the loss; 1 stays.
        around: a context around the passes of a step.
    """
    history, parameters = History(), list(net.parameters())
    masters = [
        value.detach().float().clone().requires_grad_() if parameter.dtype is low else parameter
        for parameter, value in zip(parameters, parameters if exact is None else exact, strict=True)
    ]
    optimizer, backoff = make_optimizer(masters), 1.0 if scale == 1.0 else 0.5
    for step in range(steps):
        kept = {name: buffer.clone() for name, buffer in net.named_buffers()}
        net.zero_grad()
        with around(step):
            (loss_of(step) * scale).backward()
        for parameter, master in zip(parameters, masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() * (1 / scale)
        moves = all(bool(master.grad.isfinite().all()) for master in masters)  # type: ignore[union-attr]
        with torch.no_grad():
            if moves:
                optimizer.step()
                for parameter, master in zip(parameters, masters, strict=True):
                    parameter.copy_(master)
            else:
                scale *= backoff
                for name, buffer in net.named_buffers():
                    buffer.copy_(kept[name])
        history.scales.append(scale)
        history.stepped.append(moves)
    history.values = values(net, optimizer)
    return history
