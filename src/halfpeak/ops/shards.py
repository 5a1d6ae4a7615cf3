"""Shards (``DTensor``): access to the local tensor of this rank, and reductions of ``found_inf`` and norms over the mesh."""

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
    """Whether the default process group of ``torch.distributed`` is initialised."""
    return dist.is_available() and dist.is_initialized()


def has_shards(tensors: Sequence[Tensor]) -> bool:
    """Whether one of the tensors is a shard. Without a process group there is none, so no tensor is checked."""
    return has_process_group() and not set(map(type, tensors)) <= _PLAIN and any(map(is_shard, tensors))


def local_of(tensors: Iterable[Any]) -> list[Tensor]:
    """The local tensors of shards; other tensors as they are."""
    with torch.no_grad():
        return [tensor.to_local() if is_shard(tensor) else tensor for tensor in tensors]


def local_gradients(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of this rank's parts of parameters; a gradient with other placements is redistributed first."""
    if not has_shards(params):
        return grads
    cut: list[Any] = list(zip(grads, params, strict=True))
    return local_of(
        grad
        if not is_shard(grad) or grad.placements == one.placements
        else grad.redistribute(one.device_mesh, one.placements)
        for grad, one in cut
    )


def shard_like(local: Tensor, parameter: Any, shape: Sequence[int] | None = None) -> Tensor:
    """``local`` as this rank's part of a ``DTensor`` with the placements of a parameter; itself if that is no shard.

    Args:
        shape: of the whole tensor, if it is not that of the parameter.
    """
    if not is_shard(parameter):
        return local
    from torch.distributed.tensor import DTensor  # a slow import, already done where a shard exists

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape if shape is None else torch.Size(shape),
        stride=parameter.stride() if shape is None else torch.empty(tuple(shape), device="meta").stride(),
    )


def parts_of(shard: Any) -> tuple[int, ...]:
    """Into how many parts a shard's mesh splits each dimension of the whole tensor."""
    parts = [1] * shard.ndim
    for ranks, placement in zip(shard.device_mesh.shape, shard.placements, strict=True):
        # Shard has it, and so has the one of tensor parallelism under FSDP2, which has no public name.
        if hasattr(placement, "dim"):
            parts[placement.dim] *= ranks
    return tuple(parts)


def split_of(tensor: Any) -> tuple[Any, tuple[int, ...]] | None:
    """The mesh of a shard, and the mesh dimensions over which the tensor is split; None if it is no shard."""
    return (tensor.device_mesh, _split_dims(tensor)) if is_shard(tensor) else None


def sum_over(values: Tensor, split: tuple[Any, tuple[int, ...]] | None) -> Tensor:
    """Sum ``values`` in place over the ranks that hold the parts of a tensor; ``split`` is that of :func:`split_of`."""
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
    """The norm of all elements of shards and other tensors together, with one reduction for each mesh and split.

    Args:
        tensors: the same tensors on every rank; one that is no shard has the same values on every rank.
        norm_type: as in ``torch.linalg.vector_norm``.
        local_norm: computes the norm of plain tensors.
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
    """The mesh dimensions over which a tensor is split."""
    return tuple(dim for dim, placement in enumerate(shard.placements) if not placement.is_replicate())


def _summed(tensor: Any) -> Any:
    """Complete a pending (partial) sum over ranks, because the norm of a sum is not the sum of norms."""
    if not is_shard(tensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate  # a slow import, already done where a shard exists

    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def _all_reduce_(scalar: Tensor, mesh: Any, dims: Iterable[int], op: Any) -> None:
    """All-reduce a scalar over mesh dimensions, on the device of the mesh, because offloaded gradients are elsewhere."""
    there = scalar if scalar.device.type == mesh.device_type else scalar.to(mesh.device_type)
    for dim in dims:
        if mesh.size(dim) > 1:
            dist.all_reduce(there, op=op, group=mesh.get_group(dim))
    if there is not scalar:
        scalar.copy_(there)


_PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))
