"""The processes of one run, as torchrun starts them: their devices, and what they tell each other."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from halfpeak.core.errors import ConfigError
from halfpeak.recipes.device import find_device
from halfpeak.runner import allreduce_params, get_dist_info, init_dist
from halfpeak.runner.allreduce import broadcast_tensors


def count() -> int:
    """How many processes torchrun started for this run; 1 without torchrun.

    >>> count()
    1
    """
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this is the process that prints and writes.

    >>> is_first()
    True
    """
    return count() == 1 or os.environ.get("RANK", "0") == "0"


@contextmanager
def processes(device: str) -> Generator[None]:
    """Inside, the processes are one group, by nccl on CUDA and by gloo on a CPU; nothing where there is only one.

    Each takes the accelerator with its local number.

    Raises:
        ConfigError: ``device`` names one accelerator for all of them.
    """
    if count() == 1:
        yield
        return
    if ":" in device:
        kind = device.partition(":")[0]
        raise ConfigError(
            f"device={device!r} is one device for {count()} processes; write device={kind!r}, and each takes its own"
        )
    init_dist("pytorch", backend=dist.get_default_backend_for_device(find_device(device).type))
    try:
        yield
    finally:
        dist.destroy_process_group()


def from_first(text: str, device: torch.device) -> str:
    """What the first process said here."""
    if get_dist_info()[1] == 1:
        return text
    said = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    length = torch.tensor(said.numel(), device=device)
    broadcast_tensors([length])
    said = said if is_first() else torch.empty(int(length), dtype=torch.uint8, device=device)
    broadcast_tensors([said])
    return bytes(said.tolist()).decode()


def any_of(flag: bool, device: torch.device) -> bool:
    """Whether any process says so. Waits for the device."""
    if get_dist_info()[1] == 1:
        return flag
    share = torch.tensor(float(flag), device=device)
    allreduce_params([share])
    return bool(share > 0)
