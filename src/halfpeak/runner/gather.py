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
    """The value of each rank, in their order, on rank 0; nothing elsewhere. All ranks must call it.

    One rank after the other sends, so that rank 0 holds one more value at a time on the device, and the rest on the host.

    Raises:
        CheckpointError: ``value`` is not plain data.

    >>> gather({"seed": 1})
    [{'seed': 1}]
    """
    value = plain(value)
    rank, world = get_dist_info()
    if world == 1:
        return [value]
    device = torch.accelerator.current_accelerator() if dist.get_backend() == "nccl" else None
    mine = torch.empty(0, dtype=torch.uint8) if rank == 0 else _write(value)
    lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(lengths, torch.tensor([mine.numel()], device=device))
    if rank > 0:
        dist.send(mine.to(device), 0)
        return []
    found = [value]
    for source in range(1, world):
        received = torch.empty(int(lengths[source]), dtype=torch.uint8, device=device)
        dist.recv(received, source)
        file = bytearray(received.numel())
        torch.frombuffer(file, dtype=torch.uint8).copy_(received)
        found.append(torch.load(io.BytesIO(file), map_location="cpu", weights_only=True))
    return found


def _write(value: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
