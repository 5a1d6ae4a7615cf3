"""Replicas of a model under ``DistributedDataParallel``: checks, equal masters, and when gradients are reduced."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Final
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfpeak.core.errors import ConfigError, OrderError, RankMismatchError
from halfpeak.ops.async_scalar import AsyncScalar
from halfpeak.ops.shards import reduce_found_inf_
from halfpeak.ops.unsharded import is_fully_sharded
from halfpeak.parts.pairs import Pairs


def check_wrapped(wrapped: Any) -> None:
    """Check that a module around a model reduces gradients where a window finds them.

    Raises:
        ConfigError: ``delay_all_reduce_named_params``, which reduces gradients in its own memory.
    """
    if getattr(wrapped, "_delay_all_reduce_params", None):
        raise ConfigError(
            "delay_all_reduce_named_params: DistributedDataParallel reduces these gradients where it has laid them, and an "
            "engine sets gradients aside, so ranks would part; leave delay_all_reduce_named_params out"
        )


def check_built_after_casts(wrapped: Any) -> None:
    """Check that ``DistributedDataParallel`` wrapped parameters of the current dtypes: it silently reduces no others.

    Raises:
        OrderError: parameters became low-precision since.
    """
    known = wrapped._get_ddp_logging_data().get("dtypes", "")
    dtypes = {parameter.dtype for parameter in wrapped.parameters() if parameter.requires_grad}
    for dtype, name in _NAMES.items():
        if dtype in dtypes and name not in known:
            raise OrderError(
                f"DistributedDataParallel wrapped the model before its parameters became {dtype}, and would not reduce their "
                "gradients; prepare the model first, then wrap it"
            )


_NAMES: Final = {torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}
"""The names of dtypes in the logging data of ``DistributedDataParallel``."""


def broadcast_masters(pairs: Pairs, wrapped: Any) -> None:
    """Give all ranks the masters of rank 0, for the parameters that ``wrapped`` keeps equal.

    ``DistributedDataParallel`` broadcasts low-precision weights, but not masters. If only rank 0 loaded a checkpoint,
    the masters of other ranks would be the upcast weights and would stay different from the masters of rank 0.

    Args:
        pairs: of this rank's engine.
        wrapped: a ``DistributedDataParallel``.
    """
    group, ignored = wrapped.process_group, wrapped.parameters_to_ignore
    if dist.get_world_size(group) == 1:
        return
    pairs.agree()
    first = dist.get_global_rank(group, 0)
    for name, parameter in wrapped.module.named_parameters():
        value = None if name in ignored else pairs.float32_value(parameter)
        if value is not None:
            value = value.detach()
            with torch.no_grad():
                dist.broadcast(value, src=first, group=group)
                parameter.copy_(pairs.set_value(parameter, value))
    pairs.agree()


class LossComparison:
    """Compares over the ranks which loss a backward pass was of, where a wrapper has reduced its gradients.

    Ranks that scale by different factors add up what nobody can unscale, and their loss scales would part. Each compares one
    number; nothing waits. With one loss there is nothing to compare.
    """

    def __init__(self) -> None:
        self._differs: AsyncScalar | None = None
        self._text = ""

    def compare(
        self,
        used: tuple[int, list[int]],
        weights: Sequence[Tensor],
        wrappers: Iterable[nn.Module],
        like: Tensor,
    ) -> Tensor | None:
        """1 if another rank has used other losses in the passes that were reduced now; None if the host knows of none.

        Args:
            used: the number of the loss of this pass, and those of passes before it that it has reduced, too.
            weights: whose gradients this pass has written.
            wrappers: around models.
            like: a scalar on the device of the result.

        Raises:
            RankMismatchError: they have. On an accelerator it comes in a later pass, and the step is skipped meanwhile.
        """  # f32[]
        if not weights:
            return None
        number = crc32(repr(used).encode())
        extremes = torch.stack([torch.full_like(like, sign * number, dtype=torch.int64) for sign in (1, -1)])
        written, groups = set(map(id, weights)), list[Any]()
        for wrapped in wrappers:
            if isinstance(wrapped, DistributedDataParallel) and not written.isdisjoint(_reduced_ids(wrapped)):
                groups.append(wrapped.process_group)
        for group in dict.fromkeys(groups):
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        reduce_found_inf_(extremes, weights)
        differs = (extremes.sum() != 0).to(like)
        loss, before = used
        self._text = f"loss_id={loss}" + (f" after passes of {before} under no_sync" if before else "")
        self._differs = self._differs or AsyncScalar(like.device)
        self._differs.push(differs)
        self.require_same()
        return None if like.is_cpu else differs

    def require_same(self) -> None:
        """Raise the error of :meth:`compare` as soon as the host knows."""
        if self._differs is not None and self._differs.value:
            self._differs = None
            raise RankMismatchError(
                f"the ranks used different losses in one backward pass whose gradients were reduced (here {self._text}), so "
                "each rank would divide their sum by another scale; use the same loss_id in the same order on all ranks, or "
                "num_losses=1"
            )


def _reduced_ids(wrapped: Any) -> set[int]:
    """The parameters whose gradients ``DistributedDataParallel`` reduces, by ``id``."""
    ignored = wrapped.parameters_to_ignore
    return {id(one) for name, one in wrapped.module.named_parameters() if name not in ignored}


@contextmanager
def synchronising(wrapped: nn.Module, synchronise: bool) -> Generator[None]:
    """Choose whether DDP (``no_sync``) or FSDP2 (``set_requires_gradient_sync``) reduces gradients in the body."""
    unknown: Any = wrapped
    if is_fully_sharded(wrapped):
        unknown.set_requires_gradient_sync(synchronise)
        yield
    elif callable(getattr(unknown, "no_sync", None)) and not synchronise:
        with unknown.no_sync():
            yield
    else:
        yield


def needs_first_reduction(wrapped: nn.Module) -> bool:
    """Whether the coming backward pass must be reduced: the first one of ``DistributedDataParallel(static_graph=True)``."""
    return getattr(wrapped, "_static_graph_delay_allreduce_enqueued", None) is False


def is_in_no_sync(wrapped: nn.Module | None) -> bool:
    """Whether user code has entered ``wrapped.no_sync()`` of a ``DistributedDataParallel``."""
    return not getattr(wrapped, "require_backward_grad_sync", True)
