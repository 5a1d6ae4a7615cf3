"""cast_tensor_type: casts the tensors of one dtype inside nested containers. Compatible with mmcv 1.7.2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfpeak.casting.tree import map_tree


def cast_tensor_type(inputs: Any, src_type: torch.dtype, dst_type: torch.dtype) -> Any:
    """Cast every tensor of ``src_type`` inside ``inputs`` to ``dst_type``; differentiable.

    Containers keep their types. Tensors of other dtypes, modules, strings, arrays and all other values pass through.

    >>> batch = {"image": torch.ones(1), "label": torch.ones(1, dtype=torch.int64)}
    >>> cast = cast_tensor_type(batch, torch.float32, torch.float16)
    >>> cast["image"].dtype, cast["label"].dtype
    (torch.float16, torch.int64)
    """

    def cast(leaf: Any) -> Any:
        return leaf.to(dst_type) if isinstance(leaf, Tensor) and leaf.dtype == src_type else leaf

    return map_tree(inputs, cast)
