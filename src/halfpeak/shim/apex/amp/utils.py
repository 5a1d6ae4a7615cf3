"""``apex.amp.utils``: questions about values, and casts of tensors in lists and tuples."""

from typing import Any

import torch
from torch import Tensor

from halfpeak.casting.containers import cast_tree


def is_cuda_enabled() -> bool:
    """Whether this torch was built for CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    """The CUDA that torch was built for; empty without one."""
    return tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)


def is_nested(x: Any) -> bool:
    """Whether ``x`` is a list or a tuple."""
    return isinstance(x, (list, tuple))


def is_fp_tensor(x: Any) -> bool:
    """Whether ``x`` is a floating tensor, or a list or tuple of nothing else."""
    if is_nested(x):
        return all(is_fp_tensor(one) for one in x)
    return isinstance(x, Tensor) and torch.is_floating_point(x)


def type_string(x: Tensor) -> str:
    """The tensor's type, such as ``HalfTensor``."""
    return x.type().split(".")[-1]


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """``x`` with its floating tensors in float16."""
    return cast_tree(x, torch.float16)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """``x`` with its floating tensors in float32."""
    return cast_tree(x, torch.float32)
