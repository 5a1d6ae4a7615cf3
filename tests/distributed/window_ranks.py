"""Ranks of ``test_windows.py``: several backward passes a step under ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from halfpeak import amp
from halfpeak.fused import FusedSGD
from support.nets import LEVELS

SCALE = 2.0**10
FRONTS = ("engine", "amp")
VIEWS = {"gradient_as_bucket_view": True}


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

    def __init__(
        self, front: str, level: str, model: nn.Module, *, fused: bool = False, **options: Any
    ) -> None:
        self.front, self.model = front, model
        self.optimizer: Any = (FusedSGD if fused else torch.optim.SGD)(model.parameters(), lr=0.1)
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


def two_passes(loop: Loop) -> Iterator[Any]:
    """Windows of two reduced passes."""
    for window in range(2):
        for number in range(2):
            loop.backward(2 * window + number)
        yield loop.gradients()
        loop.step()


def edited(loop: Loop) -> Iterator[Any]:
    """Windows of two reduced passes; between them the script makes float32 gradients that no low dtype holds."""
    for window in range(2):
        loop.backward(2 * window)
        for parameter in loop.model.parameters():
            parameter.grad /= 3  # type: ignore[operator]
        loop.backward(2 * window + 1)
        yield loop.gradients()
        loop.step()


def around_no_sync(loop: Loop) -> Iterator[Any]:
    """A window of a reduced, an unreduced and a reduced pass."""
    for number, local in enumerate((False, True, False)):
        loop.backward(number, local=local)
    yield loop.gradients()
    loop.step()


def overflow(loop: Loop, *, who: int) -> dict[str, Any]:
    """Windows of an unreduced pass of loss 1, which overflows in the second one on rank ``who``, and a reduced of loss 0."""
    outcomes: list[bool] = []
    for window in range(4):
        is_bad = window == 1 and dist.get_rank() == who
        loop.backward(2 * window, local=True, loss_id=1, factor=float("inf") if is_bad else 1.0)
        loop.backward(2 * window + 1)
        outcomes.append(loop.step())
    values = [parameter.detach().clone() for parameter in loop.model.parameters()]
    return {"outcomes": outcomes, "scales": loop.scales(), "values": values}


def dropped(loop: Loop) -> dict[str, Any]:
    """An unreduced pass of loss 1 is dropped, and a reduced one of loss 0 overflows."""
    loop.backward(0, local=True, loss_id=1)
    loop.model.zero_grad()
    loop.backward(1, factor=float("inf"))
    return {"outcome": loop.step(), "scales": loop.scales()}


def other_losses(loop: Loop, how: str) -> dict[str, Any]:
    """This rank's pass is of another loss than that of the other rank, or its unreduced pass before it was.

    Returns:
        The error; which gradients there are after it; and a step of passes of the same losses.
    """
    rank, said = dist.get_rank(), ""
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


def moved(level: str, factor: float) -> list[Tensor]:
    """A first pass, whose gradients the second forward pass copies to new buckets, as a fused step then reads them."""
    loop = Loop("engine", level, chain(), fused=True, **VIEWS)
    loop.backward(0, factor=factor)
    with loop.engine.forward():
        loop.wrapped(batch(1)[0])
    loop.engine.unscale()
    return loop.gradients()


def scenarios() -> dict[str, Callable[[], Any]]:
    each_alone = {**VIEWS, "bucket_cap_mb": 1e-5}
    found: dict[str, Callable[[], Any]] = {}
    for front, level in [
        ("torch", "O0"),
        *((front, level) for front in FRONTS for level in LEVELS if level != "O3"),
    ]:
        name = f"{front} {level}"
        found[f"buckets {name}"] = lambda f=front, o=level: list(
            two_passes(Loop(f, o, chain(), **each_alone))
        )
        for views in (False, True):
            found[f"views {views} {name}"] = lambda f=front, o=level, v=views: list(
                edited(Loop(f, o, chain(), gradient_as_bucket_view=v))
            )
        for static in (False, True):
            found[f"static {static} {name}"] = lambda f=front, o=level, s=static: list(
                around_no_sync(Loop(f, o, chain(), static_graph=s))
            )
        found[f"branch {name}"] = lambda f=front, o=level: list(
            around_no_sync(Loop(f, o, Branched(), find_unused_parameters=True))
        )
        if front != "torch":
            for how in ("now", "before") if level in ("O1", "O2") else ():
                found[f"losses {how} {name}"] = lambda f=front, o=level, h=how: other_losses(
                    Loop(f, o, chain()), h
                )
            found[f"dropped {name}"] = lambda f=front, o=level: dropped(Loop(f, o, chain()))
            found[f"overflow {name}"] = lambda f=front, o=level: overflow(Loop(f, o, chain()), who=1)
    for level in ("O2", "O5"):
        for factor in (1.0, float("nan")):
            found[f"moved {level} {factor}"] = lambda o=level, by=factor: moved(o, by)
        found[f"fused {level}"] = lambda o=level: list(
            two_passes(Loop("engine", o, chain(), fused=True, **VIEWS))
        )
    return found


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """The result of every scenario."""
    return {name: run() for name, run in scenarios().items()}
