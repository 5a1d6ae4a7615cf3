"""``found_inf`` over ranks: whether any rank that steps together saw a gradient that is not finite."""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from halfpeak.core.errors import ConfigError, RankMismatchError
from halfpeak.core.short_repr import short_repr
from halfpeak.ops.async_scalar import AsyncScalar
from halfpeak.ops.shards import has_process_group

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
        if group is not None and not has_process_group():
            raise ConfigError(
                f"group={short_repr(group)} needs torch.distributed; call torch.distributed.init_process_group first, or leave "
                "it out"
            )
        if isinstance(group, str) and group != "world":
            raise ConfigError(f"group={short_repr(group)} must be a process group, 'world' or None")
        self.is_local = group is None
        self._group = None if isinstance(group, str) else group
        self._differs: AsyncScalar | None = None

    @property
    def reaches_all_ranks(self) -> bool:
        """Whether every rank of the run gets what it reduces."""
        if not is_multi_rank():
            return True
        return not self.is_local and dist.get_world_size(self._group) == dist.get_world_size()

    def all_reduce_(self, found_inf: Tensor) -> None:
        """Replace ``found_inf`` by its maximum over the group.  # f32[]"""
        if not self.is_local:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self._group)

    def sum_powers(self, norm: Tensor, power: float) -> Tensor:
        """The sum over the group of ``norm ** power``, or the largest norm where ``power`` is infinite.  # f32[]"""
        total = norm.clone() if power == math.inf else norm**power
        dist.all_reduce(
            total, dist.ReduceOp.MAX if power == math.inf else dist.ReduceOp.SUM, group=self._group
        )
        return total

    def all_reduce_in_step(self, found_infs: Tensor, num_dropped: int, norm: Tensor | None) -> Tensor:
        """The maximum of ``found_infs`` over the group. The same all-reduce checks that the ranks dropped and clipped alike.

        Args:
            found_infs: of this rank.
            num_dropped: the number of passes and windows that this rank has dropped, by an exception or ``abort()``.
            norm: the norm by which this rank clipped its gradients, or None.

        Raises:
            RankMismatchError: the ranks dropped different numbers of passes, as after an exception that one rank caught, or
                clipped by different norms. On an accelerator it comes a step or two late, because nothing waits.
        """  # f32[1 + losses]
        if self.is_local:
            return found_infs
        size = (
            torch.zeros_like(found_infs[:1])
            if norm is None
            else norm.nan_to_num(0, 0, 0).reshape(1).to(found_infs)
        )
        # One number holds num_dropped and the rank, so its maximum also tells the rank. Float32 is exact below 2**24.
        rank, count = rank_and_count()
        dropped = num_dropped % (2**24 // count) * count + rank
        reduced = torch.cat([found_infs, size, -size, found_infs.new_tensor([dropped, -dropped])])
        self.all_reduce_(reduced)
        if self._differs is None:
            self._differs = AsyncScalar(found_infs.device)
        norms_differ = (reduced[-4:-2].sum() > 0) & (reduced[0] == 0)
        most, least = reduced[-2], -reduced[-1]
        parted = (most // count) > (least // count)
        self._differs.push(torch.where(norms_differ, _NORMS, torch.where(parted, most, 0.0)))
        if self._differs.value == _NORMS:
            raise RankMismatchError(
                "the ranks of group= clipped by different gradient norms, so weights that they share would diverge; set "
                "parameter.allreduce = False on parameters that only one rank has (experts, stages), and clip by ClipNorm, "
                "which then uses one norm on all ranks"
            )
        if self._differs.value > 0:
            number, other = divmod(int(self._differs.value), count)
            raise RankMismatchError(
                f"rank {other} dropped {number} backward passes or windows, and another rank fewer: it caught an exception or "
                "called abort(), and continued. Restart all ranks from a checkpoint, and do not catch an exception on one "
                "rank alone"
            )
        return reduced[:-4]


_NORMS: Final = -1.0
"""The value of ``_differs`` for norms that differ. Values above 0 encode a rank and its number of dropped windows."""


def is_multi_rank() -> bool:
    """Whether this process is one of several ranks."""
    return has_process_group() and dist.get_world_size() > 1


def rank_and_count() -> list[int]:
    """The rank of this process, and the number of ranks."""
    return [dist.get_rank(), dist.get_world_size()] if is_multi_rank() else [0, 1]


def is_first_rank() -> bool:
    """Whether this process is rank 0, or alone."""
    return not is_multi_rank() or dist.get_rank() == 0
