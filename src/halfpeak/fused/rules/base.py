"""What an update rule is: a function of tensors that every backend runs and is tested against."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from halfpeak.ops.triton import KernelConfig

StepScope: TypeAlias = Literal["parameter", "group", "nowhere"]
"""Where the number of steps is kept: as ``step`` in the state of each parameter, in its group, or not at all."""


class StateTensor(NamedTuple):
    """How one state tensor of a parameter is stored.

    Attributes:
        name: in the state.
        dtype: of its elements; None for the dtype that the rule computes in.
        block_size: elements of the parameter for each of its own. With more than one it is a vector, in the order of memory.
    """

    name: str
    dtype: torch.dtype | None = None
    block_size: int = 1


@dataclass(frozen=True, slots=True)
class Rule(ABC):
    """How an optimizer updates a weight.

    A rule is a frozen, hashable value: what changes the formula is a field of it, what changes only numbers comes in
    ``constants``, so that a compiled kernel of it serves every learning rate and step.

    Most rules go element by element and are called on any stretch of memory. A layer-wise one takes norms and is called on
    one whole parameter at a time.

    Attributes:
        step_scope: where the number of steps is kept: with each parameter as torch does, or with the group as apex does.
    """

    per_param_scalars: ClassVar[int] = 0
    """How many of the state tensors hold one number per parameter instead of one per element."""

    layerwise: ClassVar[bool] = False
    """Whether it needs all of a parameter at once."""

    step_scope: StepScope = field(default="parameter", kw_only=True)

    @property
    @abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """Names of its state tensors, as torch's optimizer calls them. Those of one number per parameter come last."""

    @property
    def storage(self) -> tuple[StateTensor, ...]:
        """How its state tensors are stored, one entry for each."""
        return tuple(map(StateTensor, self.state_names))

    def for_weight(self, dtype: torch.dtype) -> Rule:
        """The rule for weights of one dtype, where their states are stored in another format."""
        return self

    def initial(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """What each state tensor starts with."""
        return (0.0,) * len(self.state_names)

    @abstractmethod
    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """The numbers of one step, from the hyper-parameters of a group.

        Args:
            group: its learning rate and whatever else the rule reads, each a number or a tensor of one element.
            step: the number of this step, from 1: a number, or a tensor where only the device knows it.
        """

    @abstractmethod
    def __call__(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The new weight and the new state, in float32 or float64, of any shape. Nothing is written."""

    def decode(self, weight: Tensor, state: Sequence[Tensor], wide: torch.dtype) -> tuple[Tensor, ...]:
        """The weight and the state as the rule computes with them, from what is stored."""
        return (weight.to(wide), *(one.to(wide) for one in state))

    def encode(self, updated: Sequence[Tensor], constants: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What to store of the new weight and the new state; rounding to the stored dtype may be left to the caller."""
        return tuple(updated)

    def torch_fused(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> bool:
        """Update what was :meth:`decode`-d in place with torch's own fused kernel; False where there is none.

        Args:
            step: the number of this step.  # f32[] on the CPU
        """
        return False

    def kernel_config(self) -> KernelConfig | None:
        """How the Triton kernels are told of this rule; None if they do not know it."""
        return None

    def hyper_params(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """What the Triton kernels read of a group beside sign, learning rate and weight decay.

        Two numbers of the rule, ``eps`` and three switches; zeros at the end may be left out.
        """
        return ()
