"""``copy_cast_`` copies lists in one call per dtype, because every call is a launch on an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfpeak.ops import foreach


class Copies(TorchDispatchMode):
    """Counts copies: those of one tensor and those of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_)
        return func(*args, **(kwargs or {}))


def mixed() -> list[torch.Tensor]:
    """Tensors of two dtypes on a device that is not the host."""
    dtypes = (torch.float16, torch.bfloat16)
    return [torch.ones(3, dtype=dtype, device="meta") for dtype in dtypes for _ in range(10)]


def test_gradients_are_widened_by_one_copy_per_dtype() -> None:
    grads = mixed()
    with Copies() as copies:
        foreach.copy_cast_([torch.ones(3, device="meta") for _ in grads], grads)
    assert copies.count == 2


def test_masters_are_published_by_one_copy_per_dtype() -> None:
    low = mixed()
    with Copies() as copies:
        foreach.copy_cast_(low, [torch.ones(3, device="meta")] * len(low))
    assert copies.count == 2
