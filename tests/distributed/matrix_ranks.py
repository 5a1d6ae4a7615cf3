"""Front ends x levels x layouts x windows x inf on one rank, compared with one process. Arguments: ranks, folder.

``HALFPEAK_THOROUGH=1`` runs every combination and prints a table of the distances.
"""

from __future__ import annotations

import os
import sys
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
from distributed.launching import fork_ranks
from distributed.sharded_ranks import LEVELS, batch, full, net
from halfpeak import amp
from halfpeak.distributed import fully_shard
from halfpeak.optim import ApexOptimWrapper

THOROUGH = os.environ.get("HALFPEAK_THOROUGH") == "1"
FRONT_ENDS = ("engine", "amp", "wrapper")
LAYOUTS = ("DDP", "FSDP2", "HSDP", "TP", "2-D", "offload")
STEPS = 4


class Cell(NamedTuple):
    """One training."""

    front_end: str
    level: str
    layout: str
    every: int
    poisoned: bool


class Outcome(NamedTuple):
    """The weights after a training, and which steps moved them."""

    values: list[Tensor]
    moved: list[bool]


def layouts(ranks: int) -> tuple[str, ...]:
    """All layouts with two ranks; with four, those whose mesh then has both dimensions larger than one."""
    return LAYOUTS if ranks == 2 else ("HSDP", "2-D")


def cells(ranks: int = 2) -> Iterator[Cell]:
    yield from map(Cell._make, product(("engine",), ("O2",), layouts(ranks), (3,), (True,)))
    others = layouts(ranks) if THOROUGH else ("DDP", "FSDP2") if ranks == 2 else ()
    for cell in product(FRONT_ENDS, LEVELS, others, (1, 3), (False, True)):
        if THOROUGH or (cell[0] != "engine" and cell[1] in ("O2", "O5") and cell[4]):
            yield Cell(*cell)


def laid_out(layout: str, level: str) -> tuple[nn.Module, int, int]:
    """The model, the part of a batch for this rank, and the number of parts. DDP wraps later, after ``prepare``."""
    rank, ranks, model = dist.get_rank(), dist.get_world_size(), net()
    if layout == "DDP":
        return model, rank, ranks
    if layout in ("FSDP2", "offload"):
        return fully_shard(model, level, offload=layout == "offload"), rank, ranks
    inner = ranks if layout == "TP" else max(1, ranks // 2)
    mesh = init_device_mesh("cpu", (ranks // inner, inner), mesh_dim_names=("outer", "inner"))
    if layout == "HSDP":
        return fully_shard(model, level, mesh=mesh), rank, ranks
    for block in model.blocks:
        parallelize_module(block, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, level, mesh=mesh["outer"]), rank // inner, ranks // inner


def train(cell: Cell, model: nn.Module, part: int, parts: int, *, wraps: bool) -> Outcome:
    """Train on one part of each batch. If the cell is poisoned, the loss of part 0 is inf in the second step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scale, every = halfpeak.ScaleConfig(init=1024.0), cell.every
    wrapped, context, moved = model, nullcontext, []

    def step(loss: Tensor, number: int) -> None:
        with amp.scale_loss(loss / every, optimizer) as scaled:
            scaled.backward()
        if number % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()

    if cell.front_end == "amp":
        amp.initialize(model, optimizer, opt_level=cell.level, loss_scale=1024.0, verbosity=0, norms="all")
    elif cell.front_end == "wrapper":
        wrapper = ApexOptimWrapper(
            cell.level,
            optimizer=optimizer,
            accumulative_counts=every,
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
        engine = halfpeak.prepare(model, optimizer, cell.level, scale=scale, accumulate=every, clip=0.5)

        def context() -> Any:  # type: ignore[misc]
            return engine.forward(wrapped if parts > 1 or wraps else None)

        def step(loss: Tensor, number: int) -> None:
            engine.backward(loss)
            engine.step()

    if wraps:
        wrapped = DistributedDataParallel(model)
    for number in range(STEPS * every):
        before = [full(p) for p in model.parameters()]
        with context():
            loss = wrapped(batch(number).chunk(parts)[part]).float().square().mean()
        step(loss * float("inf") if cell.poisoned and part == 0 and number == every else loss, number)
        if number % every == every - 1:
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


def table(ranks: int, folder: Path) -> str:
    columns = layouts(ranks)
    seen = torch.load(folder / "rank0.pt", weights_only=True)
    lines = [f"| front end | level | {' | '.join(columns)} |", "| --- " * (2 + len(columns)) + "|"]
    for front_end, level in product(FRONT_ENDS, LEVELS):
        row = []
        for layout in columns:
            alike = (cell for cell in cells(ranks) if cell[:3] == (front_end, level, layout))
            distances = [seen[name_of(cell)]["distance"] for cell in alike]
            row.append(f"{max(distances):.0e}")
        lines.append(f"| {front_end} | {level} | {' | '.join(row)} |")
    bitwise, moved = (
        sum(one["same"] for one in seen.values()),
        sum(one["moved"] == one["alone"] for one in seen.values()),
    )
    return "\n".join(
        [*lines, f"{len(seen)} trainings, {bitwise} bitwise between ranks, {moved} with the same skips"]
    )


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {name_of(cell): measured(cell) for cell in cells(ranks)}


if __name__ == "__main__":
    failed = fork_ranks(see)
    if THOROUGH and not failed:
        print(table(int(sys.argv[1]), Path(sys.argv[2])))
    sys.exit(failed)
