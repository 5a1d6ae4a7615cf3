"""Ranks of ``test_muon.py``: torch's Muon and AdamW over shards, by an engine and by hand; what Muon cannot step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.optim import AdamW, Muon, Optimizer

import halfpeak
from distributed.launching import Refusals
from distributed.sharded_ranks import batch, full
from halfpeak.core.errors import ParameterError
from halfpeak.distributed import fully_shard
from support.nets import LOW

LEVELS = ("O2", "O5")
SCALE = 1024.0
STEPS, OVERFLOWS, SAVED = 6, 1, 3
"""Steps of a run, the one in which the loss of rank 0 is infinite, and the number after which a run is saved."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 3)
    )


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices; AdamW for the rest and for the last one, which has fewer rows than there are ranks."""
    hidden = [p for p in model.parameters() if p.ndim == 2 and len(p) > 3]
    others = [p for p in model.parameters() if p.ndim != 2 or len(p) <= 3]
    return [Muon(hidden, lr=0.02), AdamW(others, lr=1e-2, eps=1e-4)]


def values(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Weights and moments, whole."""
    rows = (row for optimizer in optimizers for row in optimizer.state.values())
    return [*map(full, model.parameters()), *(full(value) for row in rows for value in row.values())]


def loss_of(model: nn.Module, step: int) -> Tensor:
    part = batch(step).chunk(dist.get_world_size())[dist.get_rank()]
    loss = model(part).float().square().mean()
    return loss * float("inf") if step == OVERFLOWS and dist.get_rank() == 0 else loss


def by_hand(level: str) -> list[Tensor]:
    """A static loss scale written in plain torch over shards."""
    dtypes = MixedPrecisionPolicy(param_dtype=LOW[level], reduce_dtype=torch.float32)
    model = torch_fully_shard(network(), mp_policy=dtypes)
    optimizers = optimizers_of(model)
    for step in range(STEPS):
        (loss_of(model, step) * SCALE).backward()
        found_inf = torch.zeros(())
        for parameter in model.parameters():
            parameter.grad = parameter.grad / SCALE
            found_inf += (~parameter.grad.to_local().isfinite()).sum()
        dist.all_reduce(found_inf)
        for optimizer in optimizers if found_inf == 0 else ():
            optimizer.step()
        model.zero_grad()
    return values(model, optimizers)


class Run:
    """The same by an engine."""

    def __init__(self, level: str) -> None:
        self.model = fully_shard(network(), level)
        self.engine = halfpeak.prepare(
            self.model, optimizers_of(self.model), halfpeak.LEVELS[level].replace(loss_scale=SCALE)
        )

    def train(self, steps: range) -> list[bool]:
        stepped: list[bool] = []
        for step in steps:
            with self.engine.forward(self.model):
                loss = loss_of(self.model, step)
            self.engine.backward(loss)
            stepped.append(self.engine.step().stepped())
        return stepped

    def values(self) -> list[Tensor]:
        return values(self.model, self.engine.optimizers)


def trained(level: str, folder: Path) -> dict[str, Any]:
    run, resumed = Run(level), Run(level)
    stepped = run.train(range(SAVED))
    dcp.save({"engine": run.engine}, checkpoint_id=folder)
    stepped += run.train(range(SAVED, STEPS))
    dcp.load({"engine": resumed.engine}, checkpoint_id=folder)
    resumed.train(range(SAVED, STEPS))
    return {
        "by hand": by_hand(level),
        "by an engine": run.values(),
        "resumed": resumed.values(),
        "stepped": stepped,
    }


def steppable() -> list[list[Any]]:
    """Of matrices cut in several ways: what they are, whether ``prepare`` takes them, and whether Muon steps them."""
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))
    cuts: list[tuple[Any, list[Any]]] = [(line, [Shard(dim)]) for dim in (0, 1)]
    cuts += [(square, [first, Shard(dim)]) for first in (Replicate(), Shard(0)) for dim in (0, 1)]
    found: list[list[Any]] = []
    for shape, (mesh, placements) in product(
        ((1, 8), (2, 8), (3, 8), (4, 8), (5, 8), (8, 3), (8, 1), (2, 2)), cuts
    ):
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(torch.randn(shape), mesh, placements))
        optimizer = Muon(model.parameters())
        takes = steps = True
        try:
            halfpeak.prepare(model, optimizer, "O0").remove()
        except ParameterError:
            takes = False
        model.weight.grad = torch.ones_like(model.weight)
        try:
            optimizer.step()
        except RuntimeError:
            steps = False
        found.append([f"{shape} {placements}", takes, steps])
    return found


def refusals() -> dict[str, Any]:
    found = Refusals()
    model = fully_shard(network(), "O2")
    matrices = Muon([p for p in model.parameters() if p.ndim == 2])
    before = [p for group in matrices.param_groups for p in group["params"]]

    @found(
        "ParameterError: parameter 5.weight of shape (3, 8) is sharded into 4 parts of its 3 rows, and torch.optim.Muon "
        "needs at least one of them in each part; give it to AdamW"
    )
    def few_rows() -> None:
        halfpeak.prepare(model, matrices, "O2")

    after = [p for group in matrices.param_groups for p in group["params"]]
    assert all(one is other for one, other in zip(before, after, strict=True))
    halfpeak.prepare(model, optimizers_of(model), "O2")  # what the message says
    return dict(found)


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {level: trained(level, folder / level) for level in LEVELS}
    return {**seen, "steppable": steppable(), "refusals": refusals()}
