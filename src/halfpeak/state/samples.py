"""Samples of parameter values, which show in-place writes through ``parameter.data``; version counters do not."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn

from halfpeak.core.torch_compat import host_bits, is_capturing
from halfpeak.ops import foreach
from halfpeak.ops.async_scalar import AsyncScalar
from halfpeak.ops.shards import is_shard

COMPARE_EVERY: Final = 16
"""Steps from one comparison of values to the next, on an accelerator."""


class Sample:
    """Copies of some values of a parameter and its master from when they were published.

    Optimizers like Lookahead write all masters at once, and weight averaging writes all parameters, often through ``.data``.
    On the host the values show such a write, and :class:`~halfpeak.state.masters.Masters` updates the other side of the
    pairs. On an accelerator the host would wait for the values, so the device compares them once in :data:`COMPARE_EVERY`
    steps, and a warning follows when the result has arrived.

    The values are copied, because a view would count as another user of the memory.

    Args:
        indices: of the pairs that this sample stands for: all that were published with it, or made since.
    """

    def __init__(self, low: Tensor, master: Tensor, indices: Iterable[int]) -> None:
        self.indices = frozenset(indices)
        self._low, self._master = low, master
        self._low_values: bytes | Tensor | None = None
        self._master_values: bytes | Tensor | None = None
        self._records = 0
        self._written: AsyncScalar | None = None
        self.record()

    def record(self) -> None:
        """Copy the values as they are now; on an accelerator only if the coming step compares them."""
        self.record_master()
        if _is_on_host(self._low):
            self._low_values = _values(self._low)
            return
        self._records += 1
        is_due = self._records % COMPARE_EVERY == 0 and not (
            is_shard(self._low) or is_capturing(self._low.device)
        )
        self._low_values = _values(self._low) if is_due else None

    def record_master(self) -> None:
        """Copy the values of the master alone, because the caller is about to write the parameter."""
        if _is_on_host(self._master):
            self._master_values = _values(self._master)

    def forget(self) -> None:
        """Discard the parameter's values on an accelerator, because they are out of date."""
        if not _is_on_host(self._low):
            self._low_values = None

    def is_low_written(self) -> bool:
        """Whether the values of the parameter have changed; False on an accelerator."""
        return _is_on_host(self._low) and not _equal(_values(self._low), self._low_values)

    def is_master_written(self) -> bool:
        """Whether the values of the master have changed; False on an accelerator."""
        return _is_on_host(self._master) and not _equal(_values(self._master), self._master_values)

    def warn_of_writes(self) -> None:
        """Start a comparison before a step on an accelerator, and warn if an earlier comparison found a write."""
        if _is_on_host(self._low):
            return
        before, self._low_values = self._low_values, None
        now = None if before is None else _values(self._low)
        if isinstance(before, Tensor) and isinstance(now, Tensor):
            self._written = self._written or AsyncScalar(now.device)
            self._written.push((_bits(now) != _bits(before)).any())
        if self._written is not None and self._written.value:
            self._written = None
            warnings.warn(
                "weights were written in place through parameter.data, which leaves no trace on an accelerator, and the step "
                "has overwritten them from their float32 masters; write under torch.no_grad() instead: p.clamp_(...), "
                "p.copy_(...), or assign p.data = ...",
                stacklevel=2,
            )


def _values(tensor: Tensor) -> bytes | Tensor:
    """About 64 of the values of ``tensor``, on the host as bits; all of them if it is not a plain dense tensor."""
    size = tensor.numel()
    if not size or type(tensor) not in (Tensor, nn.Parameter) or not foreach.is_dense(tensor):
        return tensor.detach().clone()
    step = max(1, size // 64)
    if _is_on_host(tensor):
        return host_bits(tensor, step)
    return tensor.detach().as_strided((-(-size // step),), (step,)).clone()


def _is_on_host(tensor: Tensor) -> bool:
    """Whether the host can read values without waiting. Tests replace this function, to test on the CPU as an accelerator."""
    return tensor.is_cpu


def _equal(now: bytes | Tensor, before: bytes | Tensor | None) -> bool:
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        return torch.equal(now, before) or torch.equal(_bits(now), _bits(before))
    return isinstance(now, bytes) and isinstance(before, bytes) and now == before


def _bits(values: Tensor) -> Tensor:
    """The bits of some values, because nan is not equal to nan; the values themselves if a subclass may not give them."""
    return values.view(_INTEGERS[values.itemsize]) if type(values) is Tensor or is_shard(values) else values


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer dtype for each size of a floating-point number in bytes."""
