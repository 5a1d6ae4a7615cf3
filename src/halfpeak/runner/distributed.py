"""The ranks of a run: process group, averages, broadcasts, gathering of plain data. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import functools
import io
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from halfpeak.checkpoint.plain import plain
from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr
from halfpeak.core.state_checks import is_number
from halfpeak.optim.arguments import require_choice
from halfpeak.parts.found_inf import rank_and_count

P = ParamSpec("P")
R = TypeVar("R")


def get_dist_info() -> tuple[int, int]:
    """This process's rank and the number of ranks; ``(0, 1)`` without torch.distributed.

    >>> get_dist_info()
    (0, 1)
    """
    rank, count = rank_and_count()
    return rank, count


def master_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Run a function on rank 0 only; on other ranks it returns None."""

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return func(*args, **kwargs) if get_dist_info()[0] == 0 else None

    return call


def init_dist(launcher: str, backend: str | None = None, **kwargs: Any) -> None:
    """Start the default process group from the environment variables of a launcher.

    ::

        pytorch   RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT                       (torchrun)
        mpi       OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK; MASTER_ADDR; MASTER_PORT or 29500  (mpirun)
        slurm     SLURM_PROCID, _NTASKS, _LOCALID, _NODELIST; port=..., MASTER_PORT, or one from SLURM_JOB_ID (srun)

    On an accelerator the process selects the device of its local rank.

    Args:
        launcher: ``"pytorch"``, ``"mpi"`` or ``"slurm"``.
        backend: of ``init_process_group``; None means the device's default: nccl on CUDA, gloo on the CPU.
        kwargs: passed to ``init_process_group``; with slurm, ``port`` too.

    Raises:
        ConfigError: the launcher is unknown, or a variable is missing. Nothing was started.
    """
    launchers = {"pytorch": _from_pytorch, "mpi": _from_mpi, "slurm": _from_slurm}
    require_choice("launcher", launcher, launchers)
    port = kwargs.pop("port", None) if launcher == "slurm" else None
    environment, local_rank = launchers[launcher](port)
    if not mp.get_start_method(allow_none=True):
        mp.set_start_method("spawn")  # a forked child of a process that uses CUDA cannot use CUDA
    os.environ.update(environment)
    device = _select_device(local_rank)
    dist.init_process_group(backend=backend or dist.get_default_backend_for_device(device), **kwargs)


def _select_device(local_rank: int) -> str:
    """Select the accelerator of a rank; its type, or ``"cpu"``."""
    if torch.cuda.device_count():  # by the names of torch.cuda, as mmcv: scripts and their tests replace them
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return "cuda"
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return "cpu"
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    return device.type


Launched = tuple[dict[str, str], int]
"""Variables to add to the environment, and the local rank."""


def _from_pytorch(port: object) -> Launched:
    rank = _number("RANK", "pytorch")
    return {}, _number("LOCAL_RANK", "pytorch", rank)


def _from_mpi(port: object) -> Launched:
    rank = _number("OMPI_COMM_WORLD_RANK", "mpi")
    if "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            "launcher='mpi' needs the environment variable MASTER_ADDR; write mpirun -x MASTER_ADDR=<host of rank 0> ..."
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
    # Every task must derive the same port independently, so no task may search for a free one.
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
        raise ConfigError(
            "launcher='slurm' needs the environment variable SLURM_NODELIST or MASTER_ADDR; start the script with srun"
        )
    # A shell reads the list, and slurm writes only these characters: "node[07-08,12]-a,other".
    if not re.fullmatch(r"[\w.,\[\]-]+", nodes, re.ASCII):
        raise ConfigError(
            f"SLURM_NODELIST={short_repr(nodes)} is no list of hosts; write MASTER_ADDR=<host of rank 0>"
        )
    host = subprocess.getoutput(f"scontrol show hostname {nodes} | head -n1")
    if re.fullmatch(r"[\w.:-]+", host, re.ASCII):
        return host
    # No scontrol, as in most containers: take the first name, with each bracket's first number.
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", nodes)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0]) if first else nodes


def _number(name: str, launcher: str, default: int | None = None) -> int:
    value = os.environ.get(name, default)
    try:
        return int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        start = {"pytorch": "torchrun", "mpi": "mpirun", "slurm": "srun"}[launcher]
        found = "is not set" if value is None else f"is {short_repr(value)}"
        raise ConfigError(
            f"launcher={short_repr(launcher)} needs a number in the environment variable {name}, which {found}; start the "
            f"script with {start}"
        ) from None


def allreduce_grads(params: Iterable[Tensor], coalesce: bool = True, bucket_size_mb: float = -1) -> None:
    """Replace the gradients of ``params`` by their mean over all ranks; do nothing with one rank.

    Every rank must pass the same parameters in the same order. A gradient that only some ranks have counts as zero on
    the others, and all ranks have it afterwards. Comparing the ranks waits for the device.

    Each rank divides before the sum, so a mean that fits its dtype never overflows on the way. Two ranks get the same
    bits with and without buckets. With more ranks, the order of a sum depends on the element's position in its bucket.

    Args:
        params: parameters without ``requires_grad`` are ignored.
        coalesce: send many gradients as one tensor.
        bucket_size_mb: size of such a tensor in MiB; -1 for one bucket per dtype and device.

    Raises:
        ConfigError: ``bucket_size_mb`` is neither -1 nor above zero.
    """
    limit = parse_bucket_size(bucket_size_mb)
    if get_dist_info()[1] == 1:
        return
    trained = [param for param in params if param.requires_grad]
    _fill_missing(trained)
    _average_([param.grad for param in trained if param.grad is not None], coalesce, limit)


def allreduce_params(params: Iterable[Tensor], coalesce: bool = True, bucket_size_mb: float = -1) -> None:
    """Replace parameters or buffers by their mean over all ranks, as :func:`allreduce_grads` does for gradients.

    Means of integers, such as the batch counters of batch norms, are rounded down. Booleans do not change.

    Raises:
        ConfigError: ``bucket_size_mb`` is neither -1 nor above zero.
    """
    limit = parse_bucket_size(bucket_size_mb)
    if get_dist_info()[1] > 1:
        _average_([param.data for param in params if param.dtype is not torch.bool], coalesce, limit)


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Copy the values of rank 0 to every rank, in place."""
    if get_dist_info()[1] > 1:
        for tensor in tensors:
            dist.broadcast(tensor.data, src=0)


def parse_bucket_size(bucket_size_mb: object) -> float:
    """The maximum size of a bucket in bytes; ConfigError for a size that is neither -1 nor a number above zero.

    >>> parse_bucket_size(25), parse_bucket_size(-1)
    (26214400, inf)
    """
    if not is_number(bucket_size_mb) or not (bucket_size_mb == -1 or bucket_size_mb > 0):
        raise ConfigError(
            f"bucket_size_mb={short_repr(bucket_size_mb)} must be -1 (no limit) or a number of MiB above zero, such as 25"
        )
    return float("inf") if bucket_size_mb == -1 else bucket_size_mb * 2**20


def _fill_missing(params: Sequence[Tensor]) -> None:
    """Add zero gradients where other ranks have gradients; otherwise the all-reduce would mix parameters or hang."""
    if not params:
        return
    present = torch.tensor(
        [param.grad is not None for param in params], dtype=torch.uint8, device=params[0].device
    )
    dist.all_reduce(present, op=dist.ReduceOp.MAX)
    for param, anywhere in zip(params, present.tolist(), strict=True):
        if anywhere and param.grad is None:
            param.grad = torch.zeros_like(param)


def _average_(tensors: Sequence[Tensor], coalesce: bool, limit: float) -> None:
    floating = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    counting = [tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
    world = get_dist_info()[1]
    with torch.no_grad():
        for tensor in floating:
            tensor.div_(world)
        for bucket in buckets(tensors, limit if coalesce else 0):
            if len(bucket) == 1 and (bucket[0].is_sparse or bucket[0].is_contiguous()):
                dist.all_reduce(bucket[0])
            else:
                call_flat(dist.all_reduce, bucket)
        for tensor in counting:
            tensor.div_(world, rounding_mode="floor")


def buckets(tensors: Iterable[Tensor], limit: float) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one dtype and device, of at most ``limit`` bytes or a single tensor."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        if tensor.is_sparse:
            yield [tensor]
            continue
        key = (tensor.dtype, tensor.device)
        bucket = open_buckets.setdefault(key, [])
        sizes[key] = sizes.get(key, 0) + tensor.nbytes
        if bucket and sizes[key] > limit:
            yield bucket
            bucket = open_buckets[key] = []
            sizes[key] = tensor.nbytes
        bucket.append(tensor)
    yield from open_buckets.values()


def call_flat(call: Callable[[Tensor], Any], bucket: Sequence[Tensor]) -> None:
    """Flatten tensors of one dtype and device into one, ``call`` it with that, and copy the parts back. No gradients."""
    with torch.no_grad():
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        call(flat)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def gather(value: Any) -> list[Any]:
    """The values of all ranks, in order, on rank 0; an empty list on other ranks. All ranks must call it.

    The ranks send one after the other, so the device of rank 0 holds one value at a time and its host all values.

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
