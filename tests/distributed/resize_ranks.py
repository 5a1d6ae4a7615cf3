"""Checkpoints of four, two and one rank, each loaded on four, two and one. Arguments: ranks (4), folder.

``HALFPEAK_THOROUGH=1`` runs every level and prints a table of the distances.
"""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

from distributed.dcp_ranks import Run
from distributed.launching import fork_ranks
from support.states import differences

THOROUGH = os.environ.get("HALFPEAK_THOROUGH") == "1"
LEVELS = ("O0", "O1", "O2", "O4", "O5") if THOROUGH else ("O2",)
COPIES = (("copies", 4), ("copies", 2)) if THOROUGH else ()
KINDS = (("shards", 4), ("shards", 2), *COPIES, ("alone", 1))
"""The kind of a run, and its number of ranks."""


def name_of(level: str, source: tuple[str, int], target: tuple[str, int]) -> str:
    return f"{level}: {source[0]} {source[1]} -> {target[0]} {target[1]}"


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    # All ranks must make the group of each size; only its members train.
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in (4, 2, 1)}
    seen: dict[str, Any] = {}
    for level in LEVELS:
        saved, straight = {}, {}
        for source in KINDS:
            if rank < source[1]:
                run = Run(source[0], level, mesh=meshes[source[1]])
                run.train(range(3))
                run.save(folder / f"{level} {source[0]} {source[1]}")
                saved[source] = run.seen()
                run.train(range(3, 6))
                straight[source] = run.seen()
            dist.barrier()
        for source, target in product(KINDS, KINDS):
            seen[name_of(level, source, target)] = {}
            if rank < target[1]:
                other = Run(target[0], level, mesh=meshes[target[1]])
                other.load(folder / f"{level} {source[0]} {source[1]}")
                loaded = other.seen()
                other.train(range(3, 6))
                resumed = other.seen()
                if rank == 0:
                    pairs = zip(straight[source]["values"], resumed["values"], strict=True)
                    seen[name_of(level, source, target)] = {
                        "loaded": not differences(saved[source], loaded),
                        "resumed": not differences(straight[source], resumed),
                        "distance": max(float((a - b).abs().max()) for a, b in pairs),
                    }
            dist.barrier()
    return seen


def table(folder: Path) -> str:
    seen = torch.load(folder / "rank0.pt", weights_only=True)
    heads = [f"{kind} {size}" for kind, size in KINDS]
    lines = [f"| level | saved by | {' | '.join(heads)} |", "| --- " * (2 + len(KINDS)) + "|"]
    for level, source in product(LEVELS, KINDS):
        row = [seen[name_of(level, source, target)] for target in KINDS]
        cells = ["bitwise" if one["resumed"] else f"{one['distance']:.0e}" for one in row]
        lines.append(f"| {level} | {source[0]} {source[1]} | {' | '.join(cells)} |")
    return "\n".join([*lines, f"{len(seen)} loads, {sum(one['loaded'] for one in seen.values())} bitwise"])


if __name__ == "__main__":
    failed = fork_ranks(see)
    if THOROUGH and not failed:
        print(table(Path(sys.argv[2])))
    sys.exit(failed)
