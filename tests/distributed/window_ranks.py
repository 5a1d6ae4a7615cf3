"""Ranks of ``test_windows.py``: several backward passes a step under ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from halfpeak import amp
from support.nets import LEVELS

SCALE = 2.0**10
FRONTS = ("engine", "amp")


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(5, 6, generator=generator), torch.randn(5, 4, generator=generator)


def chain() -> nn.Module:
    """Without biases, so that a weight can fill a bucket of its own."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 4, bias=False))


class Branched(nn.Module):
    """The branch is used in passes of an odd number on this rank only if it is rank 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.branch, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        x = torch.tanh(self.stem(x))
        is_whole = self.passes % 2 == 1 or dist.get_rank() == 1
        return self.head(x + self.branch(x) if is_whole else x)


class Loop:
    """A model of one rank, trained by plain torch, an engine or amp."""

    def __init__(self, front: str, level: str, model: nn.Module, **options: Any) -> None:
        self.front, self.model = front, model
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if front == "engine":
            policy, scale = halfpeak.LEVELS[level], halfpeak.ScaleConfig(init=SCALE)
            self.engine = halfpeak.prepare(model, self.optimizer, policy, scale=scale, num_losses=2)
        elif front == "amp":
            amp.initialize(
                model, self.optimizer, opt_level=level, verbosity=0, num_losses=2, max_loss_scale=SCALE
            )
        self.wrapped = DistributedDataParallel(model, **options)

    def backward(self, number: int, *, local: bool = False, loss_id: int = 0, factor: float = 1.0) -> None:
        quiet: Callable[[], AbstractContextManager[Any]] = self.wrapped.no_sync if local else nullcontext
        x, y = batch(number)
        with quiet(), self.engine.forward() if self.front == "engine" else nullcontext():
            loss = mse_loss(self.wrapped(x).float(), y) * factor
        with quiet():
            if self.front == "engine":
                self.engine.backward(loss, loss_id=loss_id)
            elif self.front == "amp":
                with amp.scale_loss(loss, self.optimizer, loss_id=loss_id) as scaled:
                    scaled.backward()
            else:
                loss.backward()

    def step(self) -> bool:
        if self.front == "engine":
            return self.engine.step().stepped()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.front == "torch" or amp.last_step(self.optimizer).stepped()

    def gradients(self) -> list[Tensor]:
        return [p.grad.detach().float().clone() for p in self.model.parameters() if p.grad is not None]

    def scales(self) -> list[float]:
        if self.front == "engine":
            return [self.engine.read_scale(loss_id) for loss_id in range(2)]
        return [entry["loss_scale"] for entry in amp.state_dict().values()]


def buckets(front: str, level: str) -> list[list[Tensor]]:
    """Gradients of windows of two reduced passes; each weight fills a bucket, of which its gradient is a view."""
    loop = Loop(front, level, chain(), gradient_as_bucket_view=True, bucket_cap_mb=1e-5)
    found: list[list[Tensor]] = []
    for window in range(2):
        for number in range(2):
            loop.backward(2 * window + number)
        found.append(loop.gradients())
        loop.step()
    return found


def branch(front: str, level: str) -> list[list[Tensor]]:
    """Gradients of a window of a reduced, an unreduced and a reduced pass."""
    loop = Loop(front, level, Branched(), find_unused_parameters=True)
    for number, local in enumerate((False, True, False)):
        loop.backward(number, local=local)
    return [loop.gradients()]


def overflow(level: str) -> dict[str, Any]:
    """Windows of an unreduced pass of loss 1, which overflows in the second one on rank 1, and a reduced of loss 0."""
    loop, outcomes = Loop("amp", level, chain()), list[bool]()
    for window in range(4):
        is_bad = window == 1 and dist.get_rank() == 1
        loop.backward(2 * window, local=True, loss_id=1, factor=float("inf") if is_bad else 1.0)
        loop.backward(2 * window + 1)
        outcomes.append(loop.step())
    values = [parameter.detach().clone() for parameter in loop.model.parameters()]
    return {"outcomes": outcomes, "scales": loop.scales(), "values": values}


def other_losses(front: str, level: str, how: str) -> dict[str, Any]:
    """This rank's pass is of another loss than that of the other rank, or its unreduced pass before it was.

    Returns:
        The error; which gradients there are after it; and a step of passes of the same losses.
    """
    loop, rank, said = Loop(front, level, chain()), dist.get_rank(), ""
    if how == "before":
        loop.backward(0, local=True, loss_id=rank)
    try:
        loop.backward(1, loss_id=rank if how == "now" else 0)
    except halfpeak.RankMismatchError as error:
        said = str(error)
    left = loop.gradients()
    loop.model.zero_grad()
    loop.backward(2, loss_id=1)
    loop.backward(3, loss_id=0)
    stepped = loop.step()
    values = [parameter.detach().clone() for parameter in loop.model.parameters()]
    return {"said": said, "left": left, "stepped": stepped, "scales": loop.scales(), "values": values}


def scenarios() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for name in ("torch O0", *(f"amp {level}" for level in LEVELS if level != "O3")):
        front, level = name.split()
        found[f"buckets {name}"] = partial(buckets, front, level)
        found[f"branch {name}"] = partial(branch, front, level)
        if front == "amp":
            found[f"overflow {name}"] = partial(overflow, level)
    for front, level, how in product(FRONTS, ("O1", "O2"), ("now", "before")):
        found[f"losses {how} {front} {level}"] = partial(other_losses, front, level, how)
    return found


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """The result of every scenario."""
    return {name: run() for name, run in scenarios().items()}
