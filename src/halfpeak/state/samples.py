"""Samples of values: a write in place through ``parameter.data`` leaves no other trace."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn

from halfpeak.core.torch_compat import is_capturing
from halfpeak.ops import foreach
from halfpeak.ops.async_scalar import AsyncScalar
from halfpeak.ops.shards import is_shard

EVERY: Final = 16
"""On an accelerator values are compared once in this many steps."""


class Sample:
    """Some values of a parameter and its master when they were published.

    Lookahead and its like write all masters at once, and averaging all parameters, often through ``.data``. On the host such
    writes are seen and followed. On an accelerator the host would wait for the values: once in :data:`EVERY` steps they are
    compared where they lie, and a warning follows when the result has arrived.

    Copies are kept and no views: a view would count as another user of the memory.

    Args:
        low: the parameter.
        high: its master.
        indices: of all pairs that were published with it, or made since.
    """

    def __init__(self, low: Tensor, high: Tensor, indices: Iterable[int]) -> None:
        self.indices = frozenset(indices)
        self._low, self._high = low, high
        self._low_values: Tensor | None = None
        self._high_values: Tensor | None = None
        self._records = 0
        self._written: AsyncScalar | None = None
        self.record()

    def record(self) -> None:
        """Take the values as they are now; on an accelerator only where the coming step is to compare them."""
        self.record_high()
        if _is_on_host(self._low):
            self._low_values = _some_of(self._low).clone()
            return
        self._records += 1
        is_due = self._records % EVERY == 0 and not (is_shard(self._low) or is_capturing(self._low.device))
        self._low_values = _some_of(self._low).clone() if is_due else None

    def record_high(self) -> None:
        """Take the values of the master alone: its parameter is about to be written."""
        if _is_on_host(self._high):
            self._high_values = _some_of(self._high).clone()

    def forget(self) -> None:
        """What was taken on an accelerator is out of date."""
        if not _is_on_host(self._low):
            self._low_values = None

    def is_low_written(self) -> bool:
        """Whether the values of the parameter are others now, where the host knows."""
        return _is_on_host(self._low) and not _equal(self._low, self._low_values)

    def is_high_written(self) -> bool:
        """Whether the values of the master are others now, where the host knows."""
        return _is_on_host(self._high) and not _equal(self._high, self._high_values)

    def warn_of_writes(self) -> None:
        """Before a step on an accelerator: compare what was taken, and warn of what an earlier comparison has found."""
        if _is_on_host(self._low):
            return
        values, self._low_values = self._low_values, None
        if values is not None:
            self._written = self._written or AsyncScalar(values.device)
            # Compared as bits, because nan is not equal to nan.
            self._written.push((_some_of(self._low).view(torch.int16) != values.view(torch.int16)).any())
        if self._written is not None and self._written.value:
            self._written = None
            warnings.warn(
                "weights were written in place through parameter.data, which leaves no trace on an accelerator, and the step "
                "has overwritten them from their float32 masters; write under torch.no_grad() instead: p.clamp_(...), "
                "p.copy_(...), or assign p.data = ...",
                stacklevel=2,
            )


def _some_of(tensor: Tensor) -> Tensor:
    """About 64 of its values."""
    if type(tensor) not in (Tensor, nn.Parameter) or not foreach.is_dense(tensor):
        return tensor.detach()
    size = tensor.numel()
    step = max(1, size // 64)
    return tensor.detach().as_strided((-(-size // step),), (step,))


def _is_on_host(tensor: Tensor) -> bool:
    """Whether the host can look at values without waiting. Tests replace it, to see on the CPU what an accelerator does."""
    return tensor.is_cpu


def _equal(tensor: Tensor, values: Tensor | None) -> bool:
    return values is not None and torch.equal(_some_of(tensor), values)
