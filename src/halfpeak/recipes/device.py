"""The device of a run: finding it by name, deterministic kernels, threads, and its description."""

from __future__ import annotations

import os
import platform
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from halfpeak.core.errors import ConfigError
from halfpeak.distributed.launched import ALONE, Ranks


def find_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """The device of that name, on each rank another accelerator; ``"auto"`` is the accelerator if any, else the CPU.

    Raises:
        ConfigError: this machine has no such device, or fewer than ranks.

    >>> find_device("cpu")
    device(type='cpu')
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if ":" in name and ranks.count > 1:
        raise ConfigError(
            f"device={name!r} names one device, and {ranks.count} processes need one each; write "
            f"{name.partition(':')[0]!r}"
        )
    if accelerator is not None and name in ("auto", accelerator.type) and ranks.count > 1:
        name = f"{accelerator.type}:{ranks.local}"
    if name == "auto":
        return accelerator or torch.device("cpu")
    here = ["cpu"]
    if accelerator is not None:
        here += [
            accelerator.type,
            *(f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())),
        ]
    if name not in here:
        raise ConfigError(f"device={name!r} is not on this machine; write one of auto, {', '.join(here)}")
    return torch.device(name)


@contextmanager
def repeatable(enabled: bool) -> Generator[None]:
    """Let torch use only deterministic kernels inside, and restore all settings on exit."""
    if not enabled:
        yield
        return
    # cuBLAS reads this variable when it starts. Without it torch refuses deterministic matrix products.
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Any, because torch's stubs do not declare fill_uninitialized_memory, a module property.
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]


@contextmanager
def threads(count: int | None) -> Generator[None]:
    """Let ``count`` threads share one operation on a CPU inside; None keeps torch's number."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def environment(device: torch.device) -> dict[str, str]:
    """The versions and hardware on which the last bits of a result depend, beside the program."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    described = f"{device.type} ({name})"
    on_cpu = {"threads": str(torch.get_num_threads())} if device.type == "cpu" else {}
    return {"torch": str(torch.__version__), "device": described, **on_cpu}
