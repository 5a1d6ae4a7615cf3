"""Rule: the update formula of an optimizer as a function of tensors, which every backend runs and is tested against."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from halfpeak.ops.triton import KernelConfig

StepScope: TypeAlias = Literal["parameter", "group", "nowhere"]
"""Where the number of steps is stored: as ``step`` in the state of each parameter, in the group, or not at all."""


class StateTensor(NamedTuple):
    """The storage of one state tensor of a parameter.

    Attributes:
        name: its key in the state.
        dtype: of its elements; None for the dtype that the rule computes in.
        block_size: elements of the parameter per element of the state, all of one row of the parameter.
    """

    name: str
    dtype: torch.dtype | None = None
    block_size: int = 1

    def shape_for(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the state of a parameter of ``shape``: its own, or one element for each block of each row.

        >>> StateTensor("exp_avg_scale", block_size=32).shape_for((8, 3, 64))
        (8, 6)
        """
        if self.block_size == 1:
            return tuple(shape)
        return shape[0], math.prod(shape[1:]) // self.block_size


@dataclass(frozen=True, slots=True)
class Rule(ABC):
    """The update formula of an optimizer.

    A rule is a frozen, hashable value. Options that change the formula are its fields. Numbers come in ``constants``,
    so that one compiled kernel serves every learning rate and step.

    Most rules work element by element and are called on any range of memory. A layer-wise rule takes norms and is
    called on one whole parameter at a time.

    Attributes:
        step_scope: where the number of steps is stored: torch stores it with each parameter, apex with the group.
    """

    per_param_scalars: ClassVar[int] = 0
    """How many of the state tensors hold one number per parameter instead of one per element."""

    layerwise: ClassVar[bool] = False
    """Whether a call of the rule needs a whole parameter."""

    step_scope: StepScope = field(default="parameter", kw_only=True)

    @property
    @abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors in torch's optimizer. States with one number per parameter come last."""

    @property
    def storage(self) -> tuple[StateTensor, ...]:
        """The storage of each state tensor."""
        return tuple(map(StateTensor, self.state_names))

    def for_weight(self, weight: Tensor) -> Rule:
        """The rule for a weight: another rule if the storage format of states depends on its dtype or (whole) shape."""
        return self

    def initial(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The initial value of each state tensor."""
        return (0.0,) * len(self.state_names)

    @abstractmethod
    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """The numbers of one step, computed from the hyper-parameters of a group.

        Args:
            group: the learning rate and the rule's other hyper-parameters, each a number or a tensor of one element.
            step: the number of this step, from 1; a tensor if the number is stored on an accelerator.
        """

    @abstractmethod
    def __call__(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the new weight and the new state, in float32 or float64, of any shape. Writes to no argument."""

    def decode(self, weight: Tensor, state: Sequence[Tensor], wide: torch.dtype) -> tuple[Tensor, ...]:
        """The weight and the state in the dtype that the rule computes in, from the stored tensors."""
        return (weight.to(wide), *(one.to(wide) for one in state))

    def encode(self, updated: Sequence[Tensor], constants: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors to store for the new weight and state; the caller rounds them to the stored dtype."""
        return tuple(updated)

    def torch_fused(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> bool:
        """Update the results of :meth:`decode` in place by torch's own fused kernel; return False if torch has none.

        Args:
            step: the number of this step.  # f32[] on the CPU
        """
        return False

    def kernel_config(self) -> KernelConfig | None:
        """The description of this rule for the Triton kernels; None if they do not support it."""
        return None

    def hyper_params(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The numbers that the Triton kernels read beside sign, learning rate and weight decay.

        Two numbers of the rule, ``eps`` and three switches. Trailing zeros may be omitted.
        """
        return ()


def gradient_sign(group: Mapping[str, Any]) -> float:
    """The factor of a group's gradients: -1 if ``maximize`` is set, else 1."""
    return -1.0 if group.get("maximize") else 1.0
