"""The low copies of float32 weights, shared by the operations of one autograd graph."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from halfpeak.casting.walk import to


class WeightCache:
    """Casts a weight once for all operations that use it before backward.

    Copies are held weakly. A copy lives as long as the autograd graph that saved it, so the cache costs no memory, keeps
    no model alive and is empty after backward; a tied weight or an unrolled cell still saves one copy rather than one
    per use. Only matrices that train are shared: without gradients nothing holds a copy, and
    biases are cast faster than they are looked up.

    A copy is used again only while the weight's version counter and address are those it was made from. Some writes
    change neither: :meth:`drop` follows those. Memory that was handed out (``.data``, ``.numpy()``) can change at any
    time: :meth:`escape` ends sharing for that weight.

    >>> weight, cache = nn.Parameter(torch.eye(2)), WeightCache(torch.bfloat16)
    >>> first = cache.cast(weight)
    >>> cache.cast(weight) is first
    True
    >>> with torch.no_grad():
    ...     _ = weight.mul_(3)
    >>> cache.cast(weight).tolist()
    [[3.0, 0.0], [0.0, 3.0]]
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # By id: the copy, and the version and address of the weight it was made from.
        self._entries: dict[int, tuple[Any, int, int]] = {}
        self._escaped: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        """An empty one, because a copied model has other weights."""
        return type(self)(self._dtype)

    def cast(self, weight: nn.Parameter) -> Tensor:
        """The low copy of ``weight``; differentiable."""
        if weight.dim() < 2 or not (weight.requires_grad and torch.is_grad_enabled()) or is_capturing(weight):
            return to(weight, self._dtype)
        # No reference to the weight, not even a weak one, which would forbid torch.utils.swap_tensors: as long as the
        # copy lives, its graph keeps the weight, so no other object has its id.
        key, version, address = id(weight), weight._version, weight.data_ptr()
        entry = self._entries.get(key)
        if entry is not None and entry[1] == version and entry[2] == address:
            copy = entry[0]()
            if copy is not None:
                copy._fix_weakref()  # only the graph held it: own it again
                return copy
        copy = to(weight, self._dtype)
        if key not in self._escaped and not is_functorch_wrapped_tensor(copy):
            self._entries[key] = weakref.ref(copy), version, address
        return copy

    def drop(self, weight: nn.Parameter) -> None:
        """Forget the copy of ``weight``: it has changed."""
        self._entries.pop(id(weight), None)

    def escape(self, weight: nn.Parameter) -> None:
        """Forget the copy of ``weight`` and share no other: from now on it can change unseen."""
        self.drop(weight)
        self._escaped.add(id(weight))

    def clear(self) -> None:
        """Forget every copy. Weights whose memory was handed out stay excluded."""
        self._entries.clear()


def is_capturing(weight: Tensor) -> bool:
    """Whether what is computed from ``weight`` now becomes a part of a CUDA graph."""
    # A CUDA graph would replay a copy made before capture for ever.
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()
