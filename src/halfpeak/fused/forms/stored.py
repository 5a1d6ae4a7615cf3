"""Stored: a rule whose weight and state lie in other forms than float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfpeak.core.errors import ParameterError
from halfpeak.fused.forms.codecs import Codec, Remainder, Whole
from halfpeak.fused.rules.base import Count, Part, Rule


@dataclass(frozen=True, slots=True)
class Stored(Rule):
    """A rule, the same arithmetic, between a decoding and an encoding.

    Its slots are the parts of the rule's slots, then the remainder of the weight.

    Attributes:
        rule: what moves the decoded numbers, element by element.
        codecs: of each of its slots.
        master: of the weight; None leaves the weight as it is.

    Example:
        >>> from halfpeak.fused.forms.codecs import Remainder, Signed8, Squares8
        >>> from halfpeak.fused.rules.adam import AdamRule
        >>> Stored(AdamRule(), (Signed8(), Squares8()), Remainder()).slots
        ('exp_avg', 'exp_avg_scale', 'exp_avg_sq', 'exp_avg_sq_scale', 'remainder')
    """

    rule: Rule
    codecs: tuple[Codec, ...]
    master: Remainder | None

    def for_weight(self, dtype: torch.dtype) -> Rule:
        """See :class:`~halfpeak.fused.rules.base.Rule`.

        Raises:
            ParameterError: remainders of float16 weights.
        """
        if dtype is torch.float64:
            return self.rule
        if dtype is torch.float16 and self.master is not None:
            raise ParameterError(
                "a float16 weight has a smaller range than float32, so no 16-bit remainder makes it exact; store weights in "
                "bfloat16 (level 'O5'), or leave out master="
            )
        own = self if dtype is torch.bfloat16 else replace(self, master=None)
        return self.rule if own.master is None and all(codec == Whole() for codec in self.codecs) else own

    @property
    def parts(self) -> tuple[Part, ...]:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        own = [
            part._replace(name=slot + part.name)
            for slot, codec in zip(self.rule.slots, self.codecs, strict=True)
            for part in codec.parts
        ]
        return (*own, *(() if self.master is None else self.master.parts[1:]))

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of its state tensors."""
        return tuple(part.name for part in self.parts)

    @property
    def count(self) -> Count:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        return self.rule.count

    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """Those of the rule, and the number of the step."""
        return (*self.rule.constants(group, step), step)

    def __call__(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        return self.rule(weight, grad, slots, constants[:-1])

    def fused(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> bool:
        """See :class:`~halfpeak.fused.rules.base.Rule`; of what was read."""
        return self.rule.fused(weight, grad, slots, group, step)

    def read(self, weight: Tensor, slots: Sequence[Tensor], wide: torch.dtype) -> tuple[Tensor, ...]:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        left = iter(slots)
        state = [codec.decode(_next(left, len(codec.parts))) for codec in self.codecs]
        whole = weight.to(wide) if self.master is None else self.master.decode((weight, *left))
        return (whole, *state)

    def written(self, moved: Sequence[Tensor], constants: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        seed = constants[-1]
        weight, *rest = (moved[0],) if self.master is None else self.master.encode(moved[0], seed)
        stored = [
            part
            for codec, value in zip(self.codecs, moved[1:], strict=True)
            for part in codec.encode(value, seed)
        ]
        return (weight, *stored, *rest)


def _next(parts: Iterator[Tensor], count: int) -> list[Tensor]:
    return [next(parts) for _ in range(count)]
