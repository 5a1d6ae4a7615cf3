"""RemainderStore: an optimizer that keeps what low parameters have rounded away, in place of float32 masters."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer


@runtime_checkable
class RemainderStore(Protocol):
    """What such an optimizer has as ``optimizer.remainders``.

    Its groups hold the low parameters themselves. A parameter and its remainder together are its float32 value, which can
    be asked for and set, and is stored nowhere.
    """

    def has(self, parameter: Tensor) -> bool:
        """Whether a parameter has a remainder, or will have one."""
        ...

    def fp32_value(self, parameter: Tensor) -> Tensor:
        """The float32 value of a parameter: a new tensor.  # f32 of its shape"""
        ...

    def set_value(self, parameter: Tensor, value: Tensor) -> None:
        """Set the float32 value of a parameter, and write it."""
        ...

    def split(self, parameter: Tensor, value: Tensor) -> Tensor:
        """:meth:`set_value` for a caller whose next write to the parameter stores the returned tensor."""
        ...

    def grad_placeholder(self, parameter: Tensor) -> Tensor:
        """A float32 placeholder of its shape without memory, whose ``grad`` the optimizer steps if there is one."""
        ...


def remainder_store_of(optimizer: Optimizer) -> RemainderStore | None:
    """The remainders of an optimizer that keeps some."""
    store = getattr(optimizer, "remainders", None)
    return store if isinstance(store, RemainderStore) else None
