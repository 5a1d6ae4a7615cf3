"""Small functions that scripts import from ``apex``, ``apex.amp.compat``, ``rnn_compat`` and ``utils``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halfpeak.casting.tree import cast_tree
from halfpeak.state.found_inf import is_first_rank


class DeprecatedFeatureWarning(FutureWarning):
    """The warning of apex 25.04 for ``amp`` and ``fp16_utils``. halfpeak deprecates neither and never issues it."""


def deprecated_warning(msg: str) -> None:
    """Issue a :class:`DeprecatedFeatureWarning`, on the first rank."""
    if is_first_rank():
        warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=2)


def has_old_rnns() -> bool:
    """Whether torch is older than 0.5: always False."""
    return False


def variable_is_tensor() -> bool:
    """Whether torch is 0.4 or newer: always True."""
    return True


def tensor_is_float_tensor() -> bool:
    """Whether ``torch.Tensor`` is a class of one dtype, as before torch 0.4: always False."""
    return False


tensor_is_variable = variable_is_tensor
is_tensor_like, is_floating_point = torch.is_tensor, torch.is_floating_point


def scalar_python_val(x: Any) -> Any:
    """The number in a tensor of one element."""
    return x.item()


def filter_attrs(module: Any, attrs: Iterable[str]) -> list[str]:
    """The names among ``attrs`` that ``module`` has."""
    return [name for name in attrs if hasattr(module, name)]


def is_cuda_enabled() -> bool:
    """Whether this torch was built for CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    """The CUDA version that torch was built for; empty for a build without CUDA."""
    return tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)


def is_nested(x: Any) -> bool:
    """Whether ``x`` is a list or a tuple."""
    return isinstance(x, (list, tuple))


def is_fp_tensor(x: Any) -> bool:
    """Whether ``x`` is a floating-point tensor, or a list or tuple of only such tensors."""
    if is_nested(x):
        return all(is_fp_tensor(one) for one in x)
    return isinstance(x, Tensor) and torch.is_floating_point(x)


def type_string(x: Tensor) -> str:
    """The tensor's type, such as ``HalfTensor``."""
    return x.type().split(".")[-1]


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """``x`` with its floating-point tensors cast to float16."""
    return cast_tree(x, torch.float16)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """``x`` with its floating-point tensors cast to float32."""
    return cast_tree(x, torch.float32)
