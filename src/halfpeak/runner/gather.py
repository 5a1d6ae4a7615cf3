"""Bringing plain data of every rank together, for the one file that rank 0 writes."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfpeak.checkpoint.plain import plain
from halfpeak.runner.dist import get_dist_info


def gather(value: Any) -> list[Any]:
    """The value of each rank, in their order, on every rank. All ranks must call it.

    Raises:
        CheckpointError: ``value`` is not plain data.

    >>> gather({"seed": 1})
    [{'seed': 1}]
    """
    value = plain(value)
    world = get_dist_info()[1]
    if world == 1:
        return [value]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    device = torch.accelerator.current_accelerator() if dist.get_backend() == "nccl" else None
    mine = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(device)
    lengths = _all(torch.tensor(mine.numel(), device=device), world)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    parts = _all(padded, world)
    return [_read(part[: int(length)]) for part, length in zip(parts, lengths, strict=True)]


def _all(tensor: Tensor, world: int) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(found, tensor)
    return found


def _read(part: Tensor) -> Any:
    return torch.load(io.BytesIO(bytes(part.tolist())), map_location="cpu", weights_only=True)
