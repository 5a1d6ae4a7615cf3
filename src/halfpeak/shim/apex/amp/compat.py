"""``apex.amp.compat``: what kind of value something is, and which names a module has."""

from typing import Any

import torch


def variable_is_tensor() -> bool:
    """Whether torch is 0.4 or newer. It is."""
    return True


def tensor_is_variable() -> bool:
    """The same."""
    return True


def tensor_is_float_tensor() -> bool:
    """Whether ``torch.Tensor`` is a class of one dtype. It is not."""
    return False


def is_tensor_like(x: Any) -> bool:
    """Whether ``x`` is a tensor."""
    return isinstance(x, torch.Tensor)


def is_floating_point(x: Any) -> bool:
    """Whether the tensor ``x`` has a floating dtype."""
    return torch.is_floating_point(x)


def scalar_python_val(x: Any) -> Any:
    """The number in a tensor of one element."""
    return x.item()


def filter_attrs(module: Any, attrs: Any) -> list[str]:
    """The names among ``attrs`` that ``module`` has."""
    return [name for name in attrs if hasattr(module, name)]
