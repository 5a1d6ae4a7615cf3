"""Ranks of ``test_matrix.py``: front ends, levels, layouts and windows, with an inf on one rank, beside one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from distributed.sharded_ranks import batch, full, net
from halfpeak import amp
from halfpeak.distributed import fully_shard
from halfpeak.optim import ApexOptimWrapper

FRONT_ENDS = {2: ("amp", "wrapper"), 4: ("engine",)}
LAYOUTS = {2: ("DDP", "FSDP2"), 4: ("HSDP", "2-D")}
"""By number of ranks. ``sharded_ranks.py`` has the engine on two ranks."""
STEPS = 4
EVERY = 3
"""Passes of a step."""


class Cell(NamedTuple):
    """One training."""

    front_end: str
    level: str
    layout: str


class Outcome(NamedTuple):
    """The weights after a training, and which steps moved them."""

    values: list[Tensor]
    moved: list[bool]


def cells(ranks: int) -> Iterator[Cell]:
    yield from map(Cell._make, product(FRONT_ENDS[ranks], ("O2", "O5"), LAYOUTS[ranks]))


def laid_out(layout: str, level: str) -> tuple[nn.Module, int, int]:
    """The model, the part of a batch for this rank, and the number of parts. DDP wraps later, after ``prepare``."""
    rank, ranks, model = dist.get_rank(), dist.get_world_size(), net()
    if layout == "DDP":
        return model, rank, ranks
    if layout == "FSDP2":
        return fully_shard(model, level), rank, ranks
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if layout == "HSDP":
        return fully_shard(model, level, mesh=mesh), rank, ranks
    for block in model.blocks:
        parallelize_module(block, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, level, mesh=mesh["outer"]), rank // 2, 2


def train(cell: Cell, model: nn.Module, part: int, parts: int, *, wraps: bool) -> Outcome:
    """Train on one part of each batch. The loss of part 0 is inf in the second step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scale = halfpeak.ScaleConfig(init=1024.0)
    wrapped, context, moved = model, nullcontext, []

    def step(loss: Tensor, number: int) -> None:
        with amp.scale_loss(loss / EVERY, optimizer) as scaled:
            scaled.backward()
        if number % EVERY == EVERY - 1:
            optimizer.step()
            optimizer.zero_grad()

    if cell.front_end == "amp":
        amp.initialize(model, optimizer, opt_level=cell.level, loss_scale=1024.0, verbosity=0, norms="all")
    elif cell.front_end == "wrapper":
        wrapper = ApexOptimWrapper(
            cell.level,
            optimizer=optimizer,
            accumulative_counts=EVERY,
            loss_scale=1024.0,
            verbosity=0,
            norms="all",  # as fully_shard
        )
        with wrapper.optim_context(model):
            pass

        def context() -> Any:  # type: ignore[misc]
            return wrapper.optim_context(wrapped)

        def step(loss: Tensor, number: int) -> None:
            wrapper.update_params(loss)
    else:
        engine = halfpeak.prepare(model, optimizer, cell.level, scale=scale, accumulate=EVERY, clip=0.5)

        def context() -> Any:  # type: ignore[misc]
            return engine.forward(wrapped if parts > 1 or wraps else None)

        def step(loss: Tensor, number: int) -> None:
            engine.backward(loss)
            engine.step()

    if wraps:
        wrapped = DistributedDataParallel(model)
    for number in range(STEPS * EVERY):
        before = [full(p) for p in model.parameters()]
        with context():
            loss = wrapped(batch(number).chunk(parts)[part]).float().square().mean()
        step(loss * float("inf") if part == 0 and number == EVERY else loss, number)
        if number % EVERY == EVERY - 1:
            moved.append(
                not all(torch.equal(a, full(p)) for a, p in zip(before, model.parameters(), strict=True))
            )
    return Outcome([full(value) for value in model.state_dict().values()], moved)


@cache
def alone(cell: Cell) -> Outcome:
    """The same training on whole batches."""
    return train(cell, net(), 0, 1, wraps=False)


def measured(cell: Cell) -> dict[str, Any]:
    """The distance of the ranks to one process, whether they are bitwise equal, and which steps moved the weights."""
    model, part, parts = laid_out(cell.layout, cell.level)
    found, one = train(cell, model, part, parts, wraps=cell.layout == "DDP"), alone(cell._replace(layout=""))
    distance = max(
        float((a.float() - b.float()).abs().max()) for a, b in zip(found.values, one.values, strict=True)
    )
    digests = [torch.hash_tensor(value).item() for value in found.values]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, digests)
    same = all(other == digests for other in of_ranks)
    return {"distance": distance, "same": same, "moved": found.moved, "alone": one.moved}


def name_of(cell: Cell) -> str:
    return " ".join(map(str, cell))


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {name_of(cell): measured(cell) for cell in cells(ranks)}
