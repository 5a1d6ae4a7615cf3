"""The low copies of float32 weights, shared by every operation of one autograd graph."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.weak import TensorWeakRef


class _Entry(NamedTuple):
    weight: TensorWeakRef
    copy: TensorWeakRef
    version: int
    address: int


class WeightCache:
    """Casts a weight once for all operations that use it before backward.

    Weights and copies are both held weakly. A copy lives as long as the autograd graph that saved it, so the cache
    costs no memory, keeps no model alive and is empty after backward; a tied weight or an unrolled cell still saves one
    copy rather than one per use. Only copies that train are kept: without gradients nothing holds them.

    A copy is used again only while the weight's version counter and address are those it was made from. Memory that
    was handed out (``.data``, ``.numpy()``) can change without either, so :meth:`escape` ends sharing for that weight.

    >>> weight, cache = nn.Parameter(torch.ones(2)), WeightCache(torch.bfloat16)
    >>> first = cache.cast(weight)
    >>> cache.cast(weight) is first
    True
    >>> with torch.no_grad():
    ...     _ = weight.mul_(3)
    >>> cache.cast(weight).tolist()
    [3.0, 3.0]
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._entries: dict[int, _Entry] = {}
        self._escaped: dict[int, weakref.ref[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def cast(self, weight: nn.Parameter) -> Tensor:
        """The low copy of ``weight``; differentiable."""
        if not (weight.requires_grad and torch.is_grad_enabled()) or _is_capturing(weight):
            return weight.to(self._dtype)
        key = id(weight)
        entry = self._entries.get(key)
        if (
            entry is not None
            and entry.version == weight._version
            and entry.address == weight.data_ptr()
            and entry.weight() is weight
        ):
            copy = entry.copy()
            if copy is not None:
                return copy
        copy = weight.to(self._dtype)
        if not self._has_escaped(weight) and not is_functorch_wrapped_tensor(copy):
            self._entries[key] = _Entry(
                TensorWeakRef(weight), TensorWeakRef(copy), weight._version, weight.data_ptr()
            )
        return copy

    def escape(self, weight: Tensor) -> None:
        """Drop the copy of ``weight`` and make no other: its memory can now change unseen."""
        key = id(weight)
        self._entries.pop(key, None)
        self._escaped[key] = weakref.ref(weight)

    def clear(self) -> None:
        """Forget every copy. Weights whose memory was handed out stay excluded."""
        self._entries.clear()
        self._escaped = {key: ref for key, ref in self._escaped.items() if ref() is not None}

    def _has_escaped(self, weight: Tensor) -> bool:
        ref = self._escaped.get(id(weight))
        return ref is not None and ref() is weight


def _is_capturing(weight: Tensor) -> bool:
    # A CUDA graph would replay a copy made before capture for ever.
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()
