"""Ranks of ``test_traffic.py``: count the collectives of a step, and of torch's loops. Arguments: ranks, folder.

``python tests/distributed/traffic_ranks.py 2 FOLDER`` prints the table of ``docs/several-gpus.md``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfpeak
from distributed.launching import fork_ranks
from halfpeak.distributed import fully_shard
from support.nets import TYPICAL

WIDTH, BLOCKS = 128, 2
TORCH = ("torch, float32", "torch, float16 and a GradScaler")
LAYOUTS = ("DDP", "FSDP2")
SMALL = 64
"""Bytes up to which an all-reduce counts as one of scalars."""

KINDS = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
}


class Case(NamedTuple):
    layout: str
    loop: str
    accumulate: int = 1
    clip: float | None = 1.0
    group: str | None = None
    check_ranks: int | None = None


class Traffic(TorchDispatchMode):
    """Counts collectives and sums the bytes of their largest tensors, by kind; all-reduces of scalars are "small"."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # torch dispatches again with the operations inside the DTensor
        namespace, name = func.namespace, func._schema.name.partition("::")[2]
        if namespace == "c10d" or (namespace == "_c10d_functional" and name == "all_reduce"):
            size = max(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            kind = "small" if size <= SMALL and KINDS[name] == "all-reduce" else KINDS[name]
            self.calls[kind] += 1
            self.bytes[kind] += size
        return func(*args, **(kwargs or {}))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(_block() for _ in range(BLOCKS)))


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def ours(case: Case) -> Callable[[], object]:
    """Make a function that runs one pass of a loop of halfpeak."""
    model = net()
    if case.layout == "FSDP2":
        fully_shard(model, case.loop)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = halfpeak.prepare(
        model,
        optimizer,
        case.loop,
        accumulate=case.accumulate,
        clip=case.clip,
        group=case.group,
        check_ranks=case.check_ranks,
    )
    wrapped = DistributedDataParallel(model) if case.layout == "DDP" else model

    def one_pass() -> None:
        with engine.forward(wrapped):
            loss = wrapped(torch.ones(4, WIDTH)).float().square().mean()
        engine.backward(loss)
        engine.step()

    return one_pass


def theirs(case: Case) -> Callable[[], object]:
    """Make a function that runs one pass of the loop in torch's documentation."""
    model: Any = net()
    low = case.loop == TORCH[1]
    if case.layout == "DDP":
        wrapped: Any = DistributedDataParallel(model)
        scaler: Any = torch.amp.GradScaler("cpu", enabled=low)
    else:
        policy = MixedPrecisionPolicy(torch.float16, torch.float32) if low else MixedPrecisionPolicy()
        for block in model:
            torch_fully_shard(block, mp_policy=policy)
        wrapped = torch_fully_shard(model, mp_policy=policy)
        scaler = ShardedGradScaler(device="cpu", enabled=low)
    optimizer = torch.optim.AdamW(model.parameters())
    passes = 0

    def one_pass() -> None:
        nonlocal passes
        passes += 1
        ends = passes % case.accumulate == 0
        if case.layout == "FSDP2":
            wrapped.set_requires_gradient_sync(ends)
        with nullcontext() if ends or case.layout == "FSDP2" else wrapped.no_sync():
            with torch.autocast("cpu", torch.float16, enabled=low and case.layout == "DDP"):
                loss = wrapped(torch.ones(4, WIDTH)).float().square().mean() / case.accumulate
            scaler.scale(loss).backward()
        if ends:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return one_pass


def measured(case: Case) -> dict[str, Any]:
    """The collectives of the third step, because DDP rebuilds its buckets in the second."""
    one_pass = (theirs if case.loop in TORCH else ours)(case)
    for _ in range(2 * case.accumulate):
        one_pass()
    with Traffic() as traffic:
        for _ in range(case.accumulate):
            one_pass()
    return {"calls": dict(traffic.calls), "bytes": dict(traffic.bytes)}


def cases() -> list[Case]:
    table = [
        Case(layout, loop, accumulate)
        for layout, loop, accumulate in product(LAYOUTS, (*TORCH, *TYPICAL), (1, 4))
    ]
    for layout, level in product(LAYOUTS, TYPICAL):
        table += [
            Case(layout, level, clip=None),
            Case(layout, level, clip=None, group="world"),
            Case(layout, level, check_ranks=1),
        ]
    return table


def name_of(case: Case) -> str:
    return " ".join(map(str, case))


def table(seen: dict[str, Any]) -> str:
    """The table of counted collectives."""
    numel = sum(parameter.numel() for parameter in net().parameters())
    kinds = ("all-gather", "reduce-scatter", "all-reduce", "small")
    counted = [
        "| | loop | all-gathers | reduce-scatters | all-reduces | of scalars | bytes per parameter | in 4 passes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for layout, loop in product(LAYOUTS, (*TORCH, *TYPICAL)):
        once, often = (seen[name_of(Case(layout, loop, passes))] for passes in (1, 4))
        one, four = (
            {kind: size / numel for kind, size in part["bytes"].items() if kind != "small"}
            for part in (once, often)
        )
        calls = " | ".join(str(once["calls"].get(kind, 0)) for kind in kinds)
        counted.append(
            f"| {layout} | {loop} | {calls} | {sum(one.values()):.1f} | {sum(four.values()):.1f} |"
        )
    return "\n".join(counted)


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {name_of(case): measured(case) for case in cases()}


if __name__ == "__main__":
    failed = fork_ranks(see)
    if not failed:
        print(table(torch.load(Path(sys.argv[2]) / "rank0.pt", weights_only=True)))
    sys.exit(failed)
