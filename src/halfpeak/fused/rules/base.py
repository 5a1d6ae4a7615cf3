"""What an update rule is: a function of tensors that every road runs and is tested against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor


class Rule(Protocol):
    """How an optimizer moves a weight, element by element.

    A rule is a frozen, hashable value: what changes the formula is a field of it, what changes only numbers comes in
    ``constants``, so that a compiled kernel of it serves every learning rate and step.
    """

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of its state tensors, as torch's optimizer calls them."""
        ...

    @property
    def counts(self) -> bool:
        """Whether torch keeps a ``step`` in the state of each parameter."""
        ...

    def initial(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """What each of the slots starts with."""
        ...

    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """The numbers of one step, from the hyper-parameters of a group.

        Args:
            group: its learning rate and whatever else the rule reads, each a number or a tensor of one element.
            step: the number of this step, from 1: a number, or a tensor where only the device knows it.
        """
        ...

    def __call__(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The new weight and the new slots, in float32, of any shape. Nothing is written."""
        ...

    def fused(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> bool:
        """Move ``weight`` and ``slots`` in place with torch's own fused kernel; False where there is none.

        Args:
            step: the number of this step.  # f32[] on the CPU
        """
        ...
