"""Starting torch.distributed from the variables of a launcher, and asking it who we are. Answers to mmcv 1.7.2."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from halfpeak.core.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def get_dist_info() -> tuple[int, int]:
    """This process's rank and how many there are; ``(0, 1)`` where torch.distributed is not in use.

    >>> get_dist_info()
    (0, 1)
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def master_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Let a function run on rank 0 alone; elsewhere it returns None."""

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return func(*args, **kwargs) if get_dist_info()[0] == 0 else None

    return call


def init_dist(launcher: str, backend: str | None = None, **kwargs: Any) -> None:
    """Start the default process group from what a launcher has put into the environment.

    ::

        pytorch   RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT                       (torchrun)
        mpi       OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK; MASTER_ADDR; MASTER_PORT or 29500  (mpirun)
        slurm     SLURM_PROCID, _NTASKS, _LOCALID, _NODELIST; port=..., MASTER_PORT, or one from SLURM_JOB_ID (srun)

    On an accelerator the process takes the device with its local rank.

    Args:
        launcher: ``"pytorch"``, ``"mpi"`` or ``"slurm"``.
        backend: of ``init_process_group``; None means that of the device: nccl on CUDA, gloo on a CPU.
        kwargs: passed to ``init_process_group``; with slurm, ``port`` too.

    Raises:
        ConfigError: an unknown launcher, or a variable that it has not set. Nothing was started.
    """
    launchers = {"pytorch": _from_pytorch, "mpi": _from_mpi, "slurm": _from_slurm}
    if launcher not in launchers:
        raise ConfigError(f"launcher={launcher!r} must be one of {', '.join(map(repr, launchers))}")
    port = kwargs.pop("port", None) if launcher == "slurm" else None
    environment, local_rank = launchers[launcher](port)
    if not mp.get_start_method(allow_none=True):
        mp.set_start_method("spawn")  # a fork of a process that uses CUDA cannot use it
    os.environ.update(environment)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None:
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    kind = "cpu" if device is None else device.type
    dist.init_process_group(backend=backend or dist.get_default_backend_for_device(kind), **kwargs)


Launched = tuple[dict[str, str], int]
"""What to add to the environment, and the local rank."""


def _from_pytorch(port: object) -> Launched:
    rank = _number("RANK", "pytorch")
    return {}, _number("LOCAL_RANK", "pytorch", rank)


def _from_mpi(port: object) -> Launched:
    rank = _number("OMPI_COMM_WORLD_RANK", "mpi")
    if "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            "launcher='mpi' needs MASTER_ADDR; write mpirun -x MASTER_ADDR=<host of rank 0> ..."
        )
    environment = {
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
        "WORLD_SIZE": str(_number("OMPI_COMM_WORLD_SIZE", "mpi")),
        "RANK": str(rank),
    }
    return environment, _number("OMPI_COMM_WORLD_LOCAL_RANK", "mpi", rank)


def _from_slurm(port: object) -> Launched:
    rank, world = _number("SLURM_PROCID", "slurm"), _number("SLURM_NTASKS", "slurm")
    local_rank = _number("SLURM_LOCALID", "slurm", rank)
    # Every task must come to the same port by itself, so none may look which ones are free.
    default = os.environ.get("MASTER_PORT", 29500 + _number("SLURM_JOB_ID", "slurm", 0) % 1000)
    environment = {
        "MASTER_PORT": str(port if port is not None else default),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR") or _first_host(),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "RANK": str(rank),
    }
    return environment, local_rank


def _first_host() -> str:
    nodes = os.environ.get("SLURM_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ConfigError("launcher='slurm' needs SLURM_NODELIST or MASTER_ADDR; start the script with srun")
    command = ["scontrol", "show", "hostname", nodes]
    try:
        hosts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"{' '.join(command)} failed ({error}); set MASTER_ADDR to the first host"
        ) from None
    return hosts[0]


def _number(name: str, launcher: str, default: int | None = None) -> int:
    value = os.environ.get(name, default)
    try:
        return int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        start = {"pytorch": "torchrun", "mpi": "mpirun", "slurm": "srun"}[launcher]
        raise ConfigError(
            f"launcher={launcher!r} needs the variable {name}, which is {value!r}; start the script with {start}"
        ) from None
