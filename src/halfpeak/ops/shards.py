"""Shards (``DTensor``): an operation works on the memory of this rank, and what is summed or found is so over the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor


def is_shard(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a ``DTensor``, of which each rank of a mesh holds its own part.

    >>> is_shard(torch.ones(2))
    False
    """
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def has_process_group() -> bool:
    """Whether this process has joined others, or is ready to."""
    return dist.is_available() and dist.is_initialized()


def has_shards(tensors: Sequence[Tensor]) -> bool:
    """Whether one of the tensors is a shard. Without a process group there is none, and nothing is looked at."""
    return has_process_group() and not set(map(type, tensors)) <= _PLAIN and any(map(is_shard, tensors))


def local_of(tensors: Iterable[Any]) -> list[Tensor]:
    """The memory of this rank, where a tensor is a shard; others as they are."""
    with torch.no_grad():
        return [tensor.to_local() if is_shard(tensor) else tensor for tensor in tensors]


def local_gradients(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of this rank's parts of parameters, cut as these are."""
    if not has_shards(params):
        return grads
    cut: list[Any] = list(zip(grads, params, strict=True))
    return local_of(
        grad
        if not is_shard(grad) or grad.placements == one.placements
        else grad.redistribute(one.device_mesh, one.placements)
        for grad, one in cut
    )


def shard_like(local: Tensor, parameter: Any) -> Tensor:
    """``local``, of this rank, as a part of a tensor that is cut as a parameter is; itself where that is no shard."""
    if not is_shard(parameter):
        return local
    from torch.distributed.tensor import DTensor  # slow, and imported already where there is a shard

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def split_of(tensor: Any) -> tuple[Any, tuple[int, ...]] | None:
    """The mesh of a shard and the dimensions of it over which the tensor is cut in parts; None where it is whole."""
    return (tensor.device_mesh, _split_dims(tensor)) if is_shard(tensor) else None


def sum_over(values: Tensor, split: tuple[Any, tuple[int, ...]] | None) -> Tensor:
    """The sums of ``values``, in place, over the ranks that have the parts of a tensor; see :func:`split_of`."""
    if split is not None:
        _all_reduce_(values, *split, dist.ReduceOp.SUM)
    return values


def reduce_found_inf_(found_inf: Tensor, tensors: Iterable[Any]) -> None:
    """Replace ``found_inf`` by its maximum over the meshes of the shards among ``tensors``.  # f32[]"""
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors if is_shard(tensor)):
        _all_reduce_(found_inf, mesh, range(mesh.ndim), dist.ReduceOp.MAX)


def global_norm(
    tensors: Iterable[Tensor], norm_type: float, local_norm: Callable[[Sequence[Tensor], float], Tensor]
) -> Tensor:
    """The norm of all elements of shards and other tensors together, by one reduction for each way in which they are sharded.

    Args:
        tensors: the same ones on every rank; what is no shard has the same values on every rank.
        norm_type: as in ``torch.linalg.vector_norm``.
        local_norm: the norm of plain tensors.
    """  # f32[]
    groups: dict[tuple[Any, tuple[int, ...]] | None, list[Tensor]] = {}
    for tensor in map(_summed, tensors):
        groups.setdefault(split_of(tensor), []).append(tensor)
    norms: list[Tensor] = []
    for split, group in groups.items():
        mesh, dims = split or (None, ())
        norm = local_norm(local_of(group), norm_type)
        if dims and norm_type == float("inf"):
            _all_reduce_(norm, mesh, dims, dist.ReduceOp.MAX)
        elif dims:
            total = norm.pow(norm_type)
            _all_reduce_(total, mesh, dims, dist.ReduceOp.SUM)
            norm = total.pow(1 / norm_type)
        norms.append(norm)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)


def _split_dims(shard: Any) -> tuple[int, ...]:
    """The dimensions of its mesh over which a tensor is cut in parts."""
    return tuple(dim for dim, placement in enumerate(shard.placements) if not placement.is_replicate())


def _summed(tensor: Any) -> Any:
    """A gradient whose sum over ranks is outstanding is summed: the norm of a sum is not that of its parts."""
    if not is_shard(tensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate  # slow, and imported already where there is a DTensor

    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def _all_reduce_(scalar: Tensor, mesh: Any, dims: Iterable[int], op: Any) -> None:
    """Reduce a scalar over dimensions of a mesh, on its device: offloaded gradients lie elsewhere."""
    there = scalar if scalar.device.type == mesh.device_type else scalar.to(mesh.device_type)
    for dim in dims:
        if mesh.size(dim) > 1:
            dist.all_reduce(there, op=op, group=mesh.get_group(dim))
    if there is not scalar:
        scalar.copy_(there)


_PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))
