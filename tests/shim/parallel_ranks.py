"""The ranks of test_parallel.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfpeak import shim

PARTS = (3, 5)
"""Rows of the batch on each rank, unequal on purpose."""


def reduction(**options: Any) -> dict[str, Any]:
    """Two micro-steps, the first inside ``no_sync``; the ranks start with different weights."""
    from apex.parallel import DistributedDataParallel

    rank = dist.get_rank()
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    parallel = DistributedDataParallel(model, **options)
    with parallel.no_sync():
        parallel(torch.full((1, 3), 1.0 + rank)).sum().backward()
    local = gradient(model)
    parallel(torch.full((1, 3), 1.0 + rank)).sum().backward()
    return {
        "weight": model.weight.detach().clone(),
        "local": local,
        "reduced": gradient(model),
        "keys": list(parallel.state_dict()),
    }


def gradient(model: nn.Linear) -> Tensor:
    assert model.weight.grad is not None
    return model.weight.grad.clone()


def unused() -> dict[str, Any]:
    """Each step leaves out another layer, under ``delay_allreduce``."""
    from apex.parallel import DistributedDataParallel

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

        def forward(self, x: Tensor, which: int) -> Tensor:
            return self.parts[which](x)

    model = Either()
    parallel = DistributedDataParallel(model, delay_allreduce=True)
    for which in (0, 1):
        parallel(torch.ones(1, 2) * (1 + dist.get_rank()), which).sum().backward()
    return {"grads": [part.weight.grad.clone() for part in model.parts]}


def switched() -> dict[str, Any]:
    """``disable_allreduce`` and ``enable_allreduce``."""
    from apex.parallel import DistributedDataParallel

    model = nn.Linear(1, 1, bias=False)
    parallel = DistributedDataParallel(model)
    parallel.disable_allreduce()
    parallel(torch.ones(1, 1) * (1 + dist.get_rank())).sum().backward()
    local = gradient(model)
    parallel.enable_allreduce()
    parallel(torch.ones(1, 1) * (1 + dist.get_rank())).sum().backward()
    return {"local": local, "reduced": gradient(model)}


def amp_level(level: str) -> dict[str, Any]:
    """amp, apex's DDP and SyncBatchNorm together, with an overflow on one rank."""
    from apex import amp
    from apex.parallel import DistributedDataParallel, convert_syncbn_model

    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    model = convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, max_loss_scale=2.0**8)
    parallel = DistributedDataParallel(model, delay_allreduce=True)
    skipped: list[bool] = []
    for step in range(4):
        loss = parallel(torch.randn(4, 4)).float().square().mean()
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        skipped.append(bool(amp_last_step(optimizer)))
    return {"parameters": [p.detach().clone() for p in amp.master_params(optimizer)], "skipped": skipped}


def amp_last_step(optimizer: Any) -> Tensor:
    from halfpeak.amp import last_step

    return last_step(optimizer).found_inf


def norm(dims: int, **options: Any) -> dict[str, Any]:
    """SyncBatchNorm over both ranks, in two training steps and one evaluation."""
    from apex.parallel import SyncBatchNorm

    rank = dist.get_rank()
    x, weight, z = batch(dims)
    rows = slice(0, PARTS[0]) if rank == 0 else slice(PARTS[0], None)
    layer = SyncBatchNorm(3, **options)
    part = x[rows].clone().requires_grad_()
    layer(x[rows] * 2)
    rest = z[rows].requires_grad_() if options.get("fuse_relu") else None
    out = layer(part) if rest is None else layer(part, rest)
    (out * weight[rows]).sum().backward()
    grads = [p.grad for p in layer.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
    layer.eval()
    return {
        "out": out.detach(),
        "input": part.grad,
        "parameters": grads,
        "state": [value.clone() for value in layer.state_dict().values()],
        "eval": layer(x[rows]).detach(),
    }


def batch(dims: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weights of the loss, and the summand of a fused ReLU."""
    generator = torch.Generator().manual_seed(dims)
    shape = (sum(PARTS), 3, *[4] * dims)
    x, weight, z = (torch.randn(shape, generator=generator) for _ in range(3))
    return x + 100, weight, z


def by_hand() -> dict[str, Any]:
    """Reducer, flat_dist_call and process groups."""
    from apex.parallel import Reducer, create_syncbn_process_group
    from apex.parallel.distributed import flat_dist_call

    rank = dist.get_rank()
    model = nn.Linear(2, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(rank + 5))
    reducer = Reducer(model)
    model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    reducer.reduce()
    grads = [torch.full((2,), float(rank)), torch.full((1,), float(rank), dtype=torch.float16)]
    Reducer(grads).reduce()
    sent = [torch.full((2, 2), float(rank)), torch.full((1,), rank)]
    flat_dist_call(sent, dist.broadcast, (1,))
    groups = [create_syncbn_process_group(size) for size in (0, 1, 2)]
    try:
        create_syncbn_process_group(3)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "grads": [p.grad.clone() for p in model.parameters() if p.grad is not None],
        "averaged": grads,
        "sent": sent,
        "groups": [None if group is None else dist.get_process_group_ranks(group) for group in groups],
        "refusal": refusal,
    }


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "average": lambda: reduction(),
    "sum": lambda: reduction(gradient_average=False),
    "predivided": lambda: reduction(gradient_predivide_factor=4.0, message_size=10),
    "predivided sum": lambda: reduction(gradient_predivide_factor=4.0, gradient_average=False),
    "in float32": lambda: reduction(allreduce_always_fp32=True, num_allreduce_streams=2, prof=True),
    "unused": unused,
    "switched": switched,
    "O1": lambda: amp_level("O1"),
    "O2": lambda: amp_level("O2"),
    "norm 0": lambda: norm(0),
    "norm 2": lambda: norm(2, momentum=0.3, eps=1e-3),
    "norm cumulative": lambda: norm(1, momentum=None),
    "norm plain": lambda: norm(1, affine=False),
    "norm relu": lambda: norm(2, fuse_relu=True),
    "by hand": by_hand,
}


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    shim.install()
    return {name: scenario() for name, scenario in SCENARIOS.items()}
