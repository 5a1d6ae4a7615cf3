"""Dividing and adding gradients on the CPU a cache's worth at a time: memory is read and written once, not three times."""

from __future__ import annotations

import torch
from torch import Tensor

from halfpeak.core.host import is_on_host, read_host
from halfpeak.ops.layouts import as_vector

CHUNK = 2**16
"""Elements at a time."""

WORTH_IT = 2**14
"""Elements of a tensor from which a loop over its chunks beats doing it in a list with others."""


def unscale_into(into: Tensor, grad: Tensor, inv_scale: Tensor, found_inf: Tensor) -> bool:
    """``into = grad * inv_scale`` in the dtype of ``into``; see :func:`halfpeak.ops.reference.unscaled`.

    Returns:
        False, and nothing is done, where the two are not chunks of host memory in one order.
    """
    both = vectors(into, grad)
    if both is None or not only_shrinks(inv_scale):
        return False
    for there, chunk in zip(both[0].split(CHUNK), both[1].split(CHUNK), strict=True):
        there.copy_(chunk)
        torch._amp_foreach_non_finite_check_and_unscale_([there], found_inf, inv_scale)
    return True


def accumulate_into(into: Tensor, grad: Tensor, inv_scale: Tensor, found_inf: Tensor) -> bool:
    """``into += grad * inv_scale``; see :func:`halfpeak.ops.reference.accumulate_`.

    Returns:
        False, and nothing is done, where the two are not chunks of host memory in one order.
    """
    both = vectors(into, grad)
    if both is None or not only_shrinks(inv_scale):
        return False
    scratch = into.new_empty(min(CHUNK, into.numel()))
    for there, chunk in zip(both[0].split(CHUNK), both[1].split(CHUNK), strict=True):
        true = scratch[: len(chunk)].copy_(chunk)
        torch._amp_foreach_non_finite_check_and_unscale_([true], found_inf, inv_scale)
        there.add_(true)
    return True


def only_shrinks(inv_scale: Tensor) -> bool:
    """Whether the host knows, without asking a device, that what is finite stays so when it is multiplied.  # f32[]"""
    return is_on_host(inv_scale) and read_host(inv_scale) <= 1


def vectors(into: Tensor, grad: Tensor) -> tuple[Tensor, Tensor] | None:
    """The memory of both as vectors, where they are large, dense, of one order and on the host, and ``into`` is float32."""
    if into.numel() < WORTH_IT or not into.is_cpu or into.dtype is not torch.float32:
        return None
    if into.requires_grad or grad.requires_grad or grad.device != into.device or not grad.is_floating_point():
        return None
    if into.shape != grad.shape or into.stride() != grad.stride():
        return None
    ours, theirs = as_vector(into), as_vector(grad)
    return None if ours is None or theirs is None else (ours, theirs)
