"""Inputs of ``GradScaler``: nested outputs to scale, and a new scale that may be a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from halfpeak.casting.tree import map_tree
from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.schedule import require_scale


def map_outputs(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to a tensor, or to each tensor in a list, tuple, dict or other iterable. Containers keep their type.

    >>> import torch
    >>> map_outputs((torch.ones(1), [torch.ones(1)]), torch.neg)
    (tensor([-1.]), [tensor([-1.])])

    Raises:
        ConfigTypeError: ``outputs`` is something else.
    """
    if isinstance(outputs, Tensor):
        return change(outputs)
    if isinstance(outputs, Mapping):
        return map_tree(outputs, lambda leaf: map_outputs(leaf, change))
    if isinstance(outputs, (list, tuple)):
        parts = [map_outputs(value, change) for value in outputs]
        return outputs._make(parts) if hasattr(outputs, "_make") else type(outputs)(parts)  # type: ignore[union-attr]
    if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
        return (map_outputs(value, change) for value in outputs)
    raise ConfigTypeError(
        f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}; write scaler.scale(loss)"
    )


def read_number(scale: float | Tensor) -> float:
    """A new scale as a number. Waits for the device where it is a tensor.

    Raises:
        ConfigError: it is not one finite number above zero.
    """
    if not isinstance(scale, Tensor):
        return require_scale("new_scale", scale)
    if scale.numel() != 1 or scale.requires_grad:
        raise ConfigError("new_scale must be a float or a tensor of one element without requires_grad")
    return float(scale)
