"""Compare counters, loss scales and weights of ranks that step together; an error names the rank and the difference."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfpeak.core.errors import RankMismatchError
from halfpeak.ops.shards import has_process_group, is_shard


def check_ranks(numbers: Mapping[str, float], tensors: Mapping[str, Tensor]) -> None:
    """Compare with all ranks, by one all-reduce of 16 bytes. Every rank must call it. Waits for the device.

    Args:
        numbers: numbers that must be equal, by name.
        tensors: tensors that must be equal, by name, compared by a hash of their bits. Shards are left out.

    Raises:
        RankMismatchError: on every rank, if one differs from the first.
    """
    if not has_process_group() or dist.get_world_size() == 1:
        return
    mine = {**numbers, **_hashes(tensors)}
    if _same_everywhere(hashlib.sha256(repr(mine).encode()).digest()):
        return
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    first = of_ranks[0]
    found: list[str] = []
    for rank, other in enumerate(of_ranks):
        keys = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        counts = [f"{key} {other.get(key)} (not {first.get(key)})" for key in keys if key in numbers]
        weights = [key for key in keys if key not in numbers]
        if weights:
            more = f" and {len(weights) - 4} more" if len(weights) > 4 else ""
            counts.append(f"the weights {', '.join(weights[:4])}{more}")
        if counts:
            found.append(f"rank {rank} differs from rank 0 in {'; '.join(counts)}")
    if found:
        raise RankMismatchError(
            f"{', '.join(found)}. Ranks that have diverged do not become equal again: go on from a checkpoint on all, and "
            "let no rank catch an exception that the others do not see"
        )


def _same_everywhere(digest: bytes) -> bool:
    """Whether all ranks have the same digest. Unlike a gather, the cost does not grow with ranks and weights."""
    number = int.from_bytes(digest[:8], "big") >> 1
    device = torch.accelerator.current_accelerator() if dist.get_backend() == "nccl" else None
    extremes = torch.tensor([number, -number], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    largest, negated_smallest = extremes.tolist()
    return largest == -negated_smallest


def _hashes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    plain = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if not is_shard(tensor) and tensor.numel() > 0
    }
    if not plain:
        return {}
    hashes = torch.stack([torch.hash_tensor(tensor).view(torch.int64) for tensor in plain.values()])
    return dict(zip(plain, hashes.tolist(), strict=True))
