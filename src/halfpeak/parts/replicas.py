"""Replicas of a model under ``DistributedDataParallel``: checks, equal masters, and when gradients are reduced."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from halfpeak.core.errors import ConfigError, OrderError
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


def is_in_no_sync(wrapped: nn.Module | None) -> bool:
    """Whether user code has entered ``wrapped.no_sync()`` of a ``DistributedDataParallel``."""
    return not getattr(wrapped, "require_backward_grad_sync", True)
