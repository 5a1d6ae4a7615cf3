"""Ranks of ``test_dcp.py``: checkpoints of four, two and one rank, each loaded on four, two and one."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

from distributed.dcp_ranks import Run
from support.states import differences

LEVEL = "O2"
KINDS = (("shards", 4), ("shards", 2), ("alone", 1))
"""The kind of a run, and its number of ranks."""


def name_of(source: tuple[str, int], target: tuple[str, int]) -> str:
    return f"{source[0]} {source[1]} -> {target[0]} {target[1]}"


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    # All ranks must make the group of each size; only its members train.
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in (4, 2, 1)}
    seen: dict[str, Any] = {}
    saved, straight = {}, {}
    for source in KINDS:
        if rank < source[1]:
            run = Run(source[0], LEVEL, mesh=meshes[source[1]])
            run.train(range(3))
            run.save(folder / f"{source[0]} {source[1]}")
            saved[source] = run.seen()
            run.train(range(3, 6))
            straight[source] = run.seen()
        dist.barrier()
    for source, target in product(KINDS, KINDS):
        seen[name_of(source, target)] = {}
        if rank < target[1]:
            other = Run(target[0], LEVEL, mesh=meshes[target[1]])
            other.load(folder / f"{source[0]} {source[1]}")
            loaded = other.seen()
            other.train(range(3, 6))
            resumed = other.seen()
            if rank == 0:
                pairs = zip(straight[source]["values"], resumed["values"], strict=True)
                seen[name_of(source, target)] = {
                    "loaded": not differences(saved[source], loaded),
                    "resumed": not differences(straight[source], resumed),
                    "distance": max(float((a - b).abs().max()) for a, b in pairs),
                }
        dist.barrier()
    return seen
