"""RemainderStore: the interface of an optimizer that stores the rounding remainders of low parameters, not masters."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer


@runtime_checkable
class RemainderStore(Protocol):
    """The attribute ``remainders`` of such an optimizer.

    The optimizer's groups hold the low parameters themselves. The float32 value of a parameter is computed from the parameter
    and its remainder, and not stored.
    """

    def has(self, parameter: Tensor) -> bool:
        """Whether a parameter has a remainder, or will have one."""
        ...

    def fp32_value(self, parameter: Tensor) -> Tensor:
        """The float32 value of a parameter: a new tensor.  # f32 of its shape"""
        ...

    def set_value(self, parameter: Tensor, value: Tensor) -> None:
        """Set the float32 value of a parameter: writes the parameter and its remainder."""
        ...

    def split(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Write the remainder for a float32 value; returns the low tensor that the caller must write to the parameter next."""
        ...


def remainder_store_of(optimizer: Optimizer) -> RemainderStore | None:
    """The store of an optimizer; None if it has none."""
    store = getattr(optimizer, "remainders", None)
    return store if isinstance(store, RemainderStore) else None
