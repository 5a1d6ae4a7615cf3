"""Small loops for the tests of the optimizer hooks: a runner's part of a step, and the same steps in plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from halfpeak.runner.log_buffer import LogBuffer
from runner.oracle.cases import Loop
from support.nets import OPTIMIZERS, make_batch


class Entries(LogBuffer):
    """A log buffer that records every update."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[dict[str, Any], float]] = []

    def update(self, vars: Mapping[str, Any], count: float = 1) -> None:
        super().update(vars, count)
        self.entries.append((dict(vars), count))


def make_loop(model: nn.Module, kind: str = "sgd", total: int = 12) -> Loop:
    loop = Loop(model, max_iters=total)
    loop.optimizer = OPTIMIZERS[kind](model.parameters())
    loop.log_buffer = Entries()
    return loop


def step(loop: Loop, hook: Any, number: int, *, overflow: bool = False) -> None:
    """One training iteration, as a runner makes it."""
    x, y = make_batch(number)
    loop.iter = number
    with hook.around_train_step(loop) or torch.enable_grad():
        loss = mse_loss(loop.model(x).float(), y)
    loop.outputs = {"loss": loss * float("inf") if overflow else loss, "num_samples": len(x)}
    hook.after_train_iter(loop)


def run(loop: Loop, hook: Any, numbers: Iterable[int], overflows: Iterable[int] = ()) -> Loop:
    loop.hook = hook  # as a runner holds its hooks
    hook.before_run(loop)
    for number in numbers:
        step(loop, hook, number, overflow=number in set(overflows))
    return loop


def by_hand(
    model: nn.Module, optimizer: Optimizer, total: int, *, clip: float | None, first: int = 0
) -> list[Tensor]:
    """Train in plain torch and float32, from batch ``first`` on; return the gradient norms."""
    norms: list[Tensor] = []
    for number in range(first, first + total):
        x, y = make_batch(number)
        mse_loss(model(x), y).backward()
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return norms
