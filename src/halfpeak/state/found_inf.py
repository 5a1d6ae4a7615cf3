"""``found_inf`` over ranks: whether any rank that steps together saw a gradient that is not finite."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from halfpeak.core.errors import ConfigError, RankMismatchError
from halfpeak.core.short_repr import short_repr
from halfpeak.ops.async_scalar import AsyncScalar

Group: TypeAlias = "dist.ProcessGroup | Literal['world'] | None"
"""The ranks that step together: a process group, ``"world"`` for the default one, or None for this rank alone."""


class FoundInfReducer:
    """Combines ``found_inf`` over the ranks of a group by one MAX all-reduce.

    Under ``DistributedDataParallel`` the gradient all-reduce has already carried an inf to every rank, so no group is
    needed. With parameters whose gradients are local to a rank (experts, pipeline or tensor parallel stages,
    parameters that DDP ignores) every rank of the group must call :meth:`all_reduce_` once per step.

    Args:
        group: a process group, ``"world"`` for the default one, or None for no collective.
    """

    def __init__(self, group: Group = None) -> None:
        if group is not None and not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"group={short_repr(group)} needs torch.distributed; call torch.distributed.init_process_group first, or leave "
                "it out"
            )
        if isinstance(group, str) and group != "world":
            raise ConfigError(f"group={short_repr(group)} must be a process group, 'world' or None")
        self.is_local = group is None
        self._group = None if isinstance(group, str) else group
        self._differs: AsyncScalar | None = None

    def all_reduce_(self, found_inf: Tensor) -> None:
        """Replace ``found_inf`` by its maximum over the group.  # f32[]"""
        if not self.is_local:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self._group)

    def all_reduce_in_step(self, found_infs: Tensor, num_dropped: int) -> Tensor:
        """``found_infs`` over the group, and with them how many windows exceptions have ended: as many on every rank.

        Args:
            found_infs: of this rank.
            num_dropped: windows that were dropped on this rank.

        Raises:
            RankMismatchError: a rank has caught an exception and gone on alone. On an accelerator a step or two late, because
                nothing waits for the value.
        """  # f32[1 + losses]
        if self.is_local:
            return found_infs
        reduced = torch.cat([found_infs, found_infs.new_tensor([num_dropped, -num_dropped])])
        self.all_reduce_(reduced)
        if self._differs is None:
            self._differs = AsyncScalar(found_infs.device)
        self._differs.push(reduced[-2:].sum())
        if self._differs.value > 0:
            raise RankMismatchError(
                f"ranks that step together have dropped different numbers of windows, this one {num_dropped}: one has caught "
                "an exception and gone on; engine.check_ranks() tells which. Go on from a checkpoint on all ranks"
            )
        return reduced[:-2]


def is_multi_rank() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_first_rank() -> bool:
    """Whether this process is rank 0, or alone."""
    return not is_multi_rank() or dist.get_rank() == 0
