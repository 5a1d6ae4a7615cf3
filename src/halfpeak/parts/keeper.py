"""Keeper: an optimizer's own knowledge of what low parameters are worth, in place of float32 masters."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer


@runtime_checkable
class Keeper(Protocol):
    """What an optimizer has that remembers beside its low parameters what they have rounded away.

    Its groups hold the low parameters themselves. What they are worth can be asked for and set, and lies nowhere.
    """

    def keeps(self, parameter: Tensor) -> bool:
        """Whether a parameter is one of those."""
        ...

    def value_of(self, parameter: Tensor) -> Tensor:
        """What it is worth: a new tensor.  # f32 of its shape"""
        ...

    def take(self, parameter: Tensor, value: Tensor) -> None:
        """Make it worth ``value``, and write it."""
        ...

    def expect(self, parameter: Tensor, value: Tensor) -> Tensor:
        """:meth:`take` for who writes the parameter himself, once and next: what he is to write."""
        ...

    def stand_in(self, parameter: Tensor) -> Tensor:
        """A float32 tensor of its shape and of no memory, whose ``grad`` the optimizer steps if there is one."""
        ...


def keeper_of(optimizer: Optimizer) -> Keeper | None:
    """The keeper of an optimizer that has one."""
    keeper = getattr(optimizer, "keeper", None)
    return keeper if isinstance(keeper, Keeper) else None
