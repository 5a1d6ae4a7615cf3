"""Ranks of ``test_pipeline.py``: each has one stage of a model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from halfpeak.distributed import fully_shard
from halfpeak.fused import FusedSGD

STEPS = 5
POISONED = 2
"""The step in which only the first stage has an inf gradient."""
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
OPTIMIZERS = {"SGD": torch.optim.SGD, "FusedSGD": FusedSGD}


def cases() -> Iterator[tuple[str, str, str]]:
    """Level, schedule, optimizer."""
    yield from product(("O0", "O1", "O2", "O4", "O5"), SCHEDULES, ("SGD",))
    yield from product(("O2", "O5"), ("1F1B",), ("FusedSGD",))


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(count)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def prepared(model: nn.Module, level: str, optimizer: str, **options: Any) -> halfpeak.Engine:
    return halfpeak.prepare(
        model,
        OPTIMIZERS[optimizer](model.parameters(), lr=0.1, momentum=0.9),
        halfpeak.LEVELS[level].replace(loss_scale="dynamic"),
        clip=0.1,
        scale=halfpeak.ScaleConfig(init=1024.0),
        **options,
    )


def poison(model: nn.Module, at: int) -> Any:
    bias = next(module for module in model.modules() if isinstance(module, nn.Linear)).bias
    return bias.register_hook(lambda grad: grad * float("inf") if at == POISONED else grad)


def alone(ranks: int, level: str, optimizer: str) -> tuple[nn.Module, list[float]]:
    model, norms = nn.Sequential(*stages(ranks)), []
    engine = prepared(model, level, optimizer)
    for at in range(STEPS):
        x, y = batch(at)
        with engine.forward():
            loss = nn.functional.mse_loss(model(x).float(), y)
        handle = poison(model, at)
        engine.backward(loss)
        norms.append(float(engine.step().grad_norm))  # type: ignore[arg-type]
        handle.remove()
    return model, norms


def piped(rank: int, ranks: int, level: str, schedule: str, optimizer: str) -> dict[str, Any]:
    model = stages(ranks)[rank]
    for parameter in model.parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]
    engine = prepared(model, level, optimizer, group="world")

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.float(), target) * engine.scale

    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    pipeline = SCHEDULES[schedule](stage, 4, loss_fn=loss_fn)
    norms, outcomes, scales = [], [], []
    for at in range(STEPS):
        x, y = batch(at)
        handle = poison(model, at) if rank == 0 else None
        with engine.forward(), engine.scaled(torch.ones(())):
            pipeline.step(*([x] if rank == 0 else []), **({"target": y} if rank == ranks - 1 else {}))
        result = engine.step()
        if handle is not None:
            handle.remove()
        norms.append(float(result.grad_norm))  # type: ignore[arg-type]
        outcomes.append(result.stepped())
        scales.append(engine.read_scale())
    whole, expected = alone(ranks, level, optimizer)
    values = whole[rank].state_dict()  # type: ignore[index]
    return {
        "norms": norms,
        "expected": expected,
        "outcomes": outcomes,
        "scales": scales,
        "distance": max(float((v - values[key]).abs().max()) for key, v in model.state_dict().items()),
        "moved": max(
            float((v - stages(ranks)[rank].state_dict()[key]).abs().max())
            for key, v in model.state_dict().items()
        ),
    }


BYPASSED = list(product(("DDP", "FSDP2", "pipeline"), ("O0", "O1", "O2", "O4", "O5")))
"""Layout and level of the runs whose ``backward()`` bypasses the engine."""


def bypassed(rank: int, ranks: int, kind: str, level: str) -> str:
    """Result or error of ``engine.step()`` on gradients of a backward pass that bypassed the engine."""
    model, (x, y) = stages(ranks)[rank if kind == "pipeline" else 0], batch(0)
    wrapped = fully_shard(model, level) if kind == "FSDP2" else model
    engine = prepared(model, level, "SGD", group=None if kind != "pipeline" else "world")
    with engine.forward():
        if kind == "pipeline":
            stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
            pipeline = ScheduleGPipe(
                stage, 4, loss_fn=lambda out, target: nn.functional.mse_loss(out.float(), target)
            )
            pipeline.step(*([x] if rank == 0 else []), **({"target": y} if rank == ranks - 1 else {}))
        else:
            wrapped = DistributedDataParallel(model) if kind == "DDP" else wrapped
            loss = nn.functional.mse_loss(wrapped(x).float(), y)
    if kind != "pipeline":
        loss.backward()
    try:
        return "stepped" if engine.step().stepped() else "skipped"
    except halfpeak.OrderError as error:
        return str(error)


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for case in cases():
        seen[" ".join(case)] = piped(rank, ranks, *case)
        dist.barrier()
    for kind, level in BYPASSED:
        seen[f"{kind} {level}"] = bypassed(rank, ranks, kind, level)
        dist.barrier()
    return seen
