"""Gradient reduction of wrapped models over ranks: switches it for the engine, notes where user code switched it off."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfpeak.distributed.replicas import check_built_after_casts, check_wrapped


@contextmanager
def synchronising(wrapped: nn.Module, synchronise: bool) -> Generator[None]:
    """Choose whether DDP (``no_sync``) or FSDP2 (``set_requires_gradient_sync``) reduces gradients in the body."""
    unknown: Any = wrapped
    if callable(getattr(unknown, "set_requires_gradient_sync", None)):
        unknown.set_requires_gradient_sync(synchronise)
        yield
    elif callable(getattr(unknown, "no_sync", None)) and not synchronise:
        with unknown.no_sync():
            yield
    else:
        yield


def note_reduction(model: nn.Module, reduces: dict[nn.Module, bool]) -> None:
    """In a forward pass with gradients, note whether the ``DistributedDataParallel`` around ``model`` will reduce them.

    Args:
        model: whose forward pass runs; outside of a ``DistributedDataParallel`` nothing is noted.
        reduces: set to False for the model if user code is in ``no_sync``, else to True.

    Raises:
        OrderError: the model was converted to low-precision weights after it was wrapped.
        ConfigError: the wrapper has ``delay_all_reduce_named_params``.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and torch.is_grad_enabled():
        if model not in reduces:
            check_built_after_casts(wrapper)
            check_wrapped(wrapper, accumulates=False)
        reduces[model] = not is_in_no_sync(wrapper)


def is_in_no_sync(wrapped: nn.Module | None) -> bool:
    """Whether user code has entered ``wrapped.no_sync()`` of a ``DistributedDataParallel``."""
    return not getattr(wrapped, "require_backward_grad_sync", True)
