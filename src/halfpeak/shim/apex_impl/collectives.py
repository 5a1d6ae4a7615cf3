"""``Reducer``, ``flat_dist_call`` and process groups of ``apex.parallel``, for scripts that reduce by themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from halfpeak.core.errors import ConfigError
from halfpeak.runner.distributed import buckets, call_flat


class Reducer:
    """Averages gradients over the ranks when the script calls :meth:`reduce`.

    The parameters of a module are broadcast from rank 0 at construction.

    Args:
        module_or_grads_list: a module, whose ``.grad`` are reduced, or the gradients themselves.

    Raises:
        ConfigError: neither a module nor a list of tensors.
    """

    def __init__(self, module_or_grads_list: nn.Module | Sequence[Tensor]) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            flat_dist_call([p.data for p in self.module.parameters()], dist.broadcast, (0,))
            return
        self.grads = list(module_or_grads_list)
        if not all(isinstance(grad, Tensor) for grad in self.grads):
            raise ConfigError("Reducer takes a module or a list of gradients; write Reducer(model)")

    def reduce(self) -> None:
        """Average the gradients over the ranks, in place."""
        if self.module is None:
            grads = self.grads
        else:
            grads = [p.grad for p in self.module.parameters() if p.requires_grad and p.grad is not None]
        flat_dist_call(grads, dist.all_reduce)


def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: tuple[Any, ...] | None = None
) -> None:
    """Run a collective in place on tensors, flattened into one tensor per dtype and device.

    ``all_reduce`` averages here, as in apex.

    Args:
        tensors: of any dtypes.
        call: the collective, such as ``torch.distributed.broadcast``.
        extra_args: arguments of ``call`` after the tensor.
    """

    def run(flat: Tensor) -> None:
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat /= dist.get_world_size()

    for bucket in buckets(tensors, math.inf):
        call_flat(run, bucket)


def create_syncbn_process_group(group_size: int) -> Any:
    """The group of ``group_size`` neighbouring ranks that contains this rank; for 0 None, which means all ranks.

    Every rank must call it.

    Raises:
        ConfigError: ``group_size`` does not divide the number of ranks.
    """
    if group_size == 0:
        return None
    ranks = dist.get_world_size()
    if not 0 < group_size <= ranks or ranks % group_size:
        sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
        raise ConfigError(f"group_size={group_size!r} must divide the {ranks} ranks; write one of {sizes}")
    groups = [dist.new_group(range(first, first + group_size)) for first in range(0, ranks, group_size)]
    return groups[dist.get_rank() // group_size]
