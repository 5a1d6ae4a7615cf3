"""``found_inf`` over ranks: whether any rank that steps together saw a gradient that is not finite."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch.distributed as dist
from torch import Tensor

from halfpeak.core.errors import ConfigError

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
                f"group={group!r} needs torch.distributed; call torch.distributed.init_process_group first, or leave "
                "it out"
            )
        if isinstance(group, str) and group != "world":
            raise ConfigError(f"group={group!r} must be a process group, 'world' or None")
        self.is_local = group is None
        self._group = None if isinstance(group, str) else group

    def all_reduce_(self, found_inf: Tensor) -> None:
        """Replace ``found_inf`` by its maximum over the group.  # f32[]"""
        if not self.is_local:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self._group)


def is_multi_rank() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_first_rank() -> bool:
    """Whether this process is rank 0, or alone."""
    return not is_multi_rank() or dist.get_rank() == 0
