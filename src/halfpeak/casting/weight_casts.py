"""A cache of the low-precision casts of float32 weights, shared by the operations of one autograd graph."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from halfpeak.casting.tree import to
from halfpeak.core.torch_compat import is_capturing


class WeightCache:
    """Casts a weight once for all operations that use it before backward.

    Casts are held by weak references. A cast lives as long as the autograd graph that saved it, so the cache costs no
    memory, keeps no model alive and is empty after backward; a tied weight or an unrolled cell saves one cast rather than
    one per use. Only matrices that train are cached: without gradients no graph holds a cast, and casting a bias takes less
    time than looking it up.

    A cast is used again only while the weight has the version counter and address of when it was made. Exposed memory
    (``.data``, ``.numpy()``) can be written without a trace: :meth:`exclude` ends caching for that weight.

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
        # By id of the weight: a weak reference to the cast, and the version and address that the weight had.
        self._entries: dict[int, tuple[Any, int, int]] = {}
        self._excluded: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        """An empty cache, because a copied model has other weights."""
        return type(self)(self._dtype)

    def cast(self, weight: nn.Parameter) -> Tensor:
        """``weight`` in the low dtype; differentiable."""
        # While a CUDA graph is captured, because every replay would read a cast made before the capture.
        if (
            weight.dim() < 2
            or not (weight.requires_grad and torch.is_grad_enabled())
            or is_capturing(weight.device)
        ):
            return to(weight, self._dtype)
        # No reference to the weight, not even a weak one, which torch.utils.swap_tensors refuses. While the cast lives,
        # its graph keeps the weight alive, so no other object can have its id.
        key, version, address = id(weight), weight._version, weight.data_ptr()
        entry = self._entries.get(key)
        if entry is not None and entry[1] == version and entry[2] == address:
            copy = entry[0]()
            if copy is not None:
                copy._fix_weakref()  # only the graph held it: make Python own it again
                return copy
        copy = to(weight, self._dtype)
        if key not in self._excluded and not is_functorch_wrapped_tensor(copy):
            self._entries[key] = weakref.ref(copy), version, address
        return copy

    def exclude(self, weight: nn.Parameter) -> None:
        """Drop the cast of ``weight`` and cache none from now on, because its memory is exposed."""
        self._entries.pop(id(weight), None)
        self._excluded.add(id(weight))

    def clear(self) -> None:
        """Drop every cast. Excluded weights stay excluded."""
        self._entries.clear()
