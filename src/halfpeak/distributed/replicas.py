"""Replicas of a model under ``DistributedDataParallel``: checks, equal masters, and when gradients are reduced."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfpeak.core.errors import ConfigError, OrderError
from halfpeak.state.pairs import Pairs
from halfpeak.state.unsharded import is_fully_sharded, reduces_gradients


def register_wrapper(
    wrapped: nn.Module, known: WeakSet[nn.Module], pairs: Pairs, *, accumulates: bool
) -> None:
    """When a module around a model is first used, check it, and give all ranks the masters of rank 0.

    Args:
        wrapped: a ``DistributedDataParallel`` or FSDP2 module, or the model itself.
        known: the modules that were used before.
        pairs: of this rank's engine.
        accumulates: whether the engine runs the passes inside a window under no_sync.

    Raises:
        OrderError: the model was converted to low-precision weights after it was wrapped.
        ConfigError: the wrapper has an option that does not fit the engine.
    """
    if wrapped not in known:
        check_wrapped(wrapped, accumulates=accumulates)
        if isinstance(wrapped, DistributedDataParallel):
            check_built_after_casts(wrapped)
            broadcast_masters(pairs, wrapped)
        known.add(wrapped)


def check_wrapped(wrapped: Any, *, accumulates: bool) -> None:
    """Check that a module around a model reduces gradients in a way that fits the engine.

    Raises:
        ConfigError: ``static_graph`` with accumulation, because passes inside a window are not reduced; or
            ``delay_all_reduce_named_params``, which reduces gradients in its own memory.
    """
    if getattr(wrapped, "_delay_all_reduce_params", None):
        raise ConfigError(
            "delay_all_reduce_named_params: DistributedDataParallel reduces these gradients where it has laid them, and an "
            "engine sets gradients aside, so ranks would part; leave delay_all_reduce_named_params out"
        )
    if accumulates and getattr(wrapped, "static_graph", False) is True:
        raise ConfigError(
            "static_graph=True with accumulate: DistributedDataParallel then counts on gradients that every backward pass "
            "reduces, and those inside a window are not; leave static_graph out"
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


def note_reduction(model: nn.Module, known: WeakSet[nn.Module], pairs: Pairs) -> None:
    """In a forward pass with gradients, note in ``pairs`` whether DDP or FSDP2 will reduce them over the ranks.

    DDP's is noted for the wrapped module, which may have more parameters than the model.

    Args:
        model: whose forward pass it is.
        known: wrappers that were used before.
        pairs: of this rank's engine.

    Raises:
        OrderError: the model was sharded, or made low-precision inside its wrapper, after it was prepared.
    """
    if not torch.is_grad_enabled():
        return
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None:
        register_wrapper(wrapper, known, pairs, accumulates=False)
        pairs.reduces[wrapper.module] = not is_in_no_sync(wrapper)
    if is_fully_sharded(model):
        if not any(params.has_shards for params in pairs.optimizers):
            _refuse_sharded_later(model, pairs)
        pairs.reduces[model] = reduces_gradients(model)


def _refuse_sharded_later(model: nn.Module, pairs: Pairs) -> None:
    ids = frozenset().union(*(params.ids for params in pairs.optimizers))
    if ids.isdisjoint(id(parameter) for parameter in model.parameters() if parameter.requires_grad):
        raise OrderError(
            "the model was sharded after it was prepared, so the optimizer holds parameters that are no longer part of it and "
            "would train nothing; call fully_shard first, build the optimizer, then prepare"
        )


def is_in_no_sync(wrapped: nn.Module | None) -> bool:
    """Whether user code has entered ``wrapped.no_sync()`` of a ``DistributedDataParallel``."""
    return not getattr(wrapped, "require_backward_grad_sync", True)
