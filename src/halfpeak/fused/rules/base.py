"""What an update rule is: a function of tensors that every road runs and is tested against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

Count: TypeAlias = Literal["parameter", "group", "nowhere"]


class Part(NamedTuple):
    """A state tensor of a parameter.

    Attributes:
        name: in the state.
        dtype: of its elements; None for the dtype that the rule computes in.
        grain: elements of the parameter for each of its own. With more than one it is a vector, in the order of memory.
    """

    name: str
    dtype: torch.dtype | None = None
    grain: int = 1


class Rule(Protocol):
    """How an optimizer moves a weight.

    A rule is a frozen, hashable value: what changes the formula is a field of it, what changes only numbers comes in
    ``constants``, so that a compiled kernel of it serves every learning rate and step.

    Most rules go element by element, and see any stretch of memory. A layer-wise one takes norms, and sees one whole
    parameter at a time.
    """

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of its state tensors, as torch's optimizer calls them. Those of one number per parameter come last."""
        ...

    @property
    def scalars(self) -> int:
        """How many of the slots hold one number per parameter instead of one per element."""
        return 0

    @property
    def layerwise(self) -> bool:
        """Whether it needs all of a parameter at once."""
        return False

    @property
    def count(self) -> Count:
        """Where the number of steps is kept: as ``step`` in the state of each parameter, or in its group."""
        return "parameter"

    @property
    def parts(self) -> tuple[Part, ...]:
        """How its slots are stored, one for each."""
        return tuple(map(Part, self.slots))

    def for_weight(self, dtype: torch.dtype) -> Rule:
        """The rule for weights of one dtype, where it stores their states in a form of their own."""
        return self

    def initial(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """What each of the slots starts with."""
        return (0.0,) * len(self.slots)

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
        """The new weight and the new slots, in float32 or float64, of any shape. Nothing is written."""
        ...

    def read(self, weight: Tensor, slots: Sequence[Tensor], wide: torch.dtype) -> tuple[Tensor, ...]:
        """What weight and slots are worth, as the rule computes with them."""
        return (weight.to(wide), *(slot.to(wide) for slot in slots))

    def written(self, moved: Sequence[Tensor], constants: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What to store of the new weight and the new slots; rounding to the dtype of its place may be left."""
        return tuple(moved)

    def fused(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> bool:
        """Move what was :meth:`read` in place with torch's own fused kernel; False where there is none.

        Args:
            step: the number of this step.  # f32[] on the CPU
        """
        return False
