"""Ranks of ``test_by_hand.py``: gradients that the script reduces, or edits, without a wrapper that halfpeak knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import halfpeak
from distributed.engine_ranks import batch, net
from halfpeak.distributed import fully_shard
from halfpeak.fused import FusedSGD

STEPS = 4
POISONED = 1
"""The step before which rank 1 overflows."""

LEVELS = ("O0", "O1", "O2", "O5")
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "FusedSGD": FusedSGD}


def summed(grads: list[Tensor]) -> None:
    for grad in grads:
        dist.all_reduce(grad)


def asynchronous(grads: list[Tensor]) -> None:
    for work in [dist.all_reduce(grad, async_op=True) for grad in grads]:
        work.wait()


def largest(grads: list[Tensor]) -> None:
    """A collective after which a rank has nothing of its own gradient."""
    for grad in grads:
        dist.broadcast(grad, 1)


REDUCTIONS: dict[str, Callable[[list[Tensor]], None]] = {
    "sum": summed,
    "asynchronous": asynchronous,
    "broadcast": largest,
}


def prepared(level: str, optimizer: str, **options: Any) -> tuple[nn.Module, halfpeak.Engine]:
    model = net()
    made = OPTIMIZERS[optimizer](model.parameters(), lr=0.05)
    return model, halfpeak.prepare(model, made, level, scale=halfpeak.ScaleConfig(init=1024.0), **options)


def seen_of(engine: halfpeak.Engine, outcomes: list[bool]) -> dict[str, Any]:
    return {
        "values": [p.detach().clone() for p in engine.models[0].parameters()],
        "mains": [p.detach().clone() for p in engine.main_params()],
        "scales": [engine.read_scale(i) for i in range(len(engine.scalers))],
        "outcomes": outcomes,
    }


def reduced(rank: int, level: str, optimizer: str, how: str) -> dict[str, Any]:
    """The script reduces the gradients of each step; rank 1 has an infinite one in one of them."""
    model, engine = prepared(level, optimizer)
    outcomes: list[bool] = []
    for step in range(STEPS):
        with engine.forward():
            loss = model(batch(rank, step)).float().square().mean()
        engine.backward(loss * float("inf") if rank == 1 and step == POISONED else loss)
        REDUCTIONS[how]([p.grad for p in model.parameters() if p.grad is not None])
        outcomes.append(engine.step().stepped())
    return seen_of(engine, outcomes)


def by_hand(rank: int) -> list[Tensor]:
    """``reduced``, "sum", in plain float32."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        if step != POISONED:
            model(batch(rank, step)).square().mean().backward()
            summed([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def mixed(rank: int, optimizer: str) -> dict[str, Any]:
    """A task per rank, with losses of scales of their own; the script reduces the gradients."""
    model, engine = prepared("O1", optimizer, num_losses=2)
    engine.scalers[1].set_scale(4096.0)
    outcomes: list[bool] = []
    for step in range(STEPS):
        if step != POISONED:
            with engine.forward():
                loss = model(batch(rank, step)).float().square().mean()
            engine.backward(loss, loss_id=rank)
            summed([p.grad for p in model.parameters() if p.grad is not None])
            outcomes.append(engine.step().stepped())
    return seen_of(engine, outcomes)


def other_losses_of_shards(rank: int) -> dict[str, Any]:
    """FSDP2 reduces the gradients of another loss on each rank, then of the same."""
    model = fully_shard(net(), "O2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = halfpeak.prepare(model, optimizer, "O2", scale=halfpeak.ScaleConfig(init=1024.0), num_losses=2)
    engine.scalers[1].set_scale(4096.0)
    said: list[str] = []
    for number in (rank, 1):
        with engine.forward(model):
            loss = model(batch(rank, number)).float().square().mean()
        try:
            engine.backward(loss, loss_id=number)
            said.append("")
        except halfpeak.RankMismatchError as error:
            said.append(str(error))
    return {"said": said, "stepped": engine.step().stepped()}


def edited_shards(rank: int, level: str, value: float, clips: bool) -> dict[str, Any]:
    """Rank 1 alone writes to its part of a gradient, through ``to_local()``."""
    model = fully_shard(net(), level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = halfpeak.prepare(
        model, optimizer, level, scale=halfpeak.ScaleConfig(init=1024.0), clip=1.0 if clips else None
    )
    outcomes: list[bool] = []
    for step in range(STEPS):
        with engine.forward(model):
            loss = model(batch(rank, step)).float().square().mean()
        engine.backward(loss)
        if rank == 1 and step == POISONED:
            for parameter in model.parameters():
                parameter.grad.to_local().fill_(value)  # type: ignore[union-attr]
        outcomes.append(engine.step().stepped())
    whole = [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]
    return {"outcomes": outcomes, "finite": all(bool(p.isfinite().all()) for p in whole)}


def compared(rank: int, how: str) -> str:
    """What ``check_ranks`` says with ``group=``, after rank 1 alone has written a weight."""
    model, engine = prepared("O2", "SGD", group="world")
    weight: Any = model[2].weight  # type: ignore[index]
    weight.allreduce = how == "shared"
    if rank == 1:
        with torch.no_grad():
            weight.add_(1.0)
    try:
        engine.check_ranks()
    except halfpeak.RankMismatchError as error:
        return str(error)
    return ""


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """The result of every scenario."""
    seen: dict[str, Any] = {
        f"{level} {optimizer} {how}": reduced(rank, level, optimizer, how)
        for level in LEVELS
        for optimizer in OPTIMIZERS
        for how in REDUCTIONS
    }
    seen["by hand"] = by_hand(rank)
    seen |= {f"mixed {optimizer}": mixed(rank, optimizer) for optimizer in OPTIMIZERS}
    seen["losses of shards"] = other_losses_of_shards(rank)
    for level in ("O0", "O2"):
        for value in (float("inf"), 0.0):
            for clips in (False, True):
                seen[f"shards {level} {value} {clips}"] = edited_shards(rank, level, value, clips)
    return {**seen, **{f"compared {how}": compared(rank, how) for how in ("shared", "of one rank")}}
