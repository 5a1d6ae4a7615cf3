"""Averaging gradients and parameters over the ranks, tensor by tensor or in buckets. Answers to mmcv 1.7.2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from halfpeak.core.errors import ConfigError
from halfpeak.runner.dist import get_dist_info


def allreduce_grads(params: Iterable[Tensor], coalesce: bool = True, bucket_size_mb: float = -1) -> None:
    """Replace the gradients of ``params`` by their mean over all ranks; with one rank there is nothing to do.

    Every rank must name the same parameters in the same order. A gradient that only some ranks have counts as zero on
    the others, and all have it afterwards. To learn that, this waits for the device.

    Each rank divides before the sum, so a mean that fits its dtype never overflows on the way. Two ranks get the same
    bits with and without buckets; with more, the order of a sum depends on where an element lies in its bucket.

    Args:
        params: those that need no gradient are left out.
        coalesce: send many gradients as one tensor.
        bucket_size_mb: how much of it at a time, in MiB; -1 for one bucket per dtype and device.

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
    """Replace parameters or buffers by their mean over all ranks, as :func:`allreduce_grads` does with gradients.

    The mean of integers, such as the batch counters of batch norms, is rounded down. Booleans stay as they are.

    Raises:
        ConfigError: ``bucket_size_mb`` is neither -1 nor above zero.
    """
    limit = parse_bucket_size(bucket_size_mb)
    if get_dist_info()[1] > 1:
        _average_([param.data for param in params if param.dtype is not torch.bool], coalesce, limit)


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Give every rank the values of rank 0."""
    if get_dist_info()[1] > 1:
        for tensor in tensors:
            dist.broadcast(tensor.data, src=0)


def parse_bucket_size(bucket_size_mb: object) -> float:
    """The bytes that a bucket may hold.

    Raises:
        ConfigError: neither -1 nor a number above zero.

    >>> parse_bucket_size(25), parse_bucket_size(-1)
    (26214400, inf)
    """
    is_number = isinstance(bucket_size_mb, (int, float)) and not isinstance(bucket_size_mb, bool)
    if not is_number or not (bucket_size_mb == -1 or bucket_size_mb > 0):  # type: ignore[operator]
        raise ConfigError(
            f"bucket_size_mb={bucket_size_mb!r} must be -1 (no limit) or a number of MiB above zero, such as 25"
        )
    return float("inf") if bucket_size_mb == -1 else bucket_size_mb * 2**20  # type: ignore[operator]


def _fill_missing(params: Sequence[Tensor]) -> None:
    """Without it, ranks that hold different gradients would add up different parameters, or wait for ever."""
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
        for bucket in _buckets(tensors, limit if coalesce else 0):
            _sum_(bucket)
        for tensor in counting:
            tensor.div_(world, rounding_mode="floor")


def _sum_(bucket: Sequence[Tensor]) -> None:
    if len(bucket) == 1 and (bucket[0].is_sparse or bucket[0].is_contiguous()):
        dist.all_reduce(bucket[0])
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[Tensor], limit: float) -> Iterator[list[Tensor]]:
    """Lists of tensors of one dtype and device, of at most ``limit`` bytes or a single tensor."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_sparse:
            yield [tensor]
            continue
        key = (tensor.dtype, tensor.device)
        bucket = open_buckets.setdefault(key, [])
        if bucket and sum(one.nbytes for one in bucket) + tensor.nbytes > limit:
            yield bucket
            bucket = open_buckets[key] = []
        bucket.append(tensor)
    yield from open_buckets.values()
