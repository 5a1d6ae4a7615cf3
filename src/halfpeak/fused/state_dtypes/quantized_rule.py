"""QuantizedRule: a rule whose weight and state are not stored as float32. StateFormat: the options that request it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr
from halfpeak.fused.rules.base import Rule, StateTensor
from halfpeak.fused.state_dtypes.codecs import Bfloat16, Codec, Identity, Int8Block, Remainder, UInt8SqrtBlock
from halfpeak.ops.triton import KernelConfig


@dataclass(frozen=True, slots=True)
class QuantizedRule(Rule):
    """A rule between decoding the stored tensors and encoding the new values.

    Its state tensors are the stored tensors of each codec, then the remainder of the weight.

    Attributes:
        rule: updates the decoded values, element by element.
        codecs: one for each state tensor of ``rule``.
        master: the codec of the weight; None stores the weight as it is.

    Example:
        >>> from halfpeak.fused.state_dtypes.codecs import Remainder, Int8Block, UInt8SqrtBlock
        >>> from halfpeak.fused.rules.adam import AdamRule
        >>> QuantizedRule(AdamRule(), (Int8Block(), UInt8SqrtBlock()), Remainder()).state_names
        ('exp_avg', 'exp_avg_scale', 'exp_avg_sq', 'exp_avg_sq_scale', 'remainder')
    """

    rule: Rule
    codecs: tuple[Codec, ...]
    master: Remainder | None

    def for_weight(self, weight: Tensor) -> Rule:
        """See :class:`~halfpeak.fused.rules.base.Rule`."""
        if weight.dtype is torch.float64:
            return self.rule
        master = self.master.of(weight.dtype) if self.master is not None and weight.dtype in LOW else None
        own = replace(
            self, codecs=tuple(codec.for_shape(weight.shape) for codec in self.codecs), master=master
        )
        return self.rule if own.master is None and all(codec == Identity() for codec in self.codecs) else own

    @property
    def storage(self) -> tuple[StateTensor, ...]:
        own = [
            part._replace(name=slot + part.name)
            for slot, codec in zip(self.rule.state_names, self.codecs, strict=True)
            for part in codec.storage
        ]
        return (*own, *(() if self.master is None else self.master.storage[1:]))

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.storage)

    def constants(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """The constants of the rule, then the number of the step."""
        return (*self.rule.constants(group, step), step)

    def __call__(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        return self.rule(weight, grad, state, constants[:-1])

    def torch_fused(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> bool:
        """See :class:`~halfpeak.fused.rules.base.Rule`; works on the decoded values."""
        return self.rule.torch_fused(weight, grad, state, group, step)

    def kernel_config(self) -> KernelConfig | None:
        config = self.rule.kernel_config()
        if config is None or self.rule.layerwise:
            return None
        formats = [codec.kernel_format for codec in self.codecs]
        first, second, third = (*formats, *config.moments[len(formats) :])
        bits = 0 if self.master is None else self.master.bits
        blocks = [part.block_size for part in self.storage if part.block_size > 1]
        return config._replace(
            master=bits, moments=(first, second, third), block=max(blocks, default=config.block)
        )

    def hyper_params(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return self.rule.hyper_params(group)

    def decode(self, weight: Tensor, state: Sequence[Tensor], wide: torch.dtype) -> tuple[Tensor, ...]:
        left = iter(state)
        decoded = [codec.decode(_next(left, len(codec.storage))) for codec in self.codecs]
        whole = weight.to(wide) if self.master is None else self.master.decode((weight, *left))
        return (whole, *decoded)

    def encode(self, updated: Sequence[Tensor], constants: Sequence[Tensor]) -> tuple[Tensor, ...]:
        seed = constants[-1]
        weight, *rest = (updated[0],) if self.master is None else self.master.encode(updated[0], seed)
        stored = [
            part
            for codec, value in zip(self.codecs, updated[1:], strict=True)
            for part in codec.encode(value, seed)
        ]
        return (weight, *stored, *rest)


def _next(parts: Iterator[Tensor], count: int) -> list[Tensor]:
    return [next(parts) for _ in range(count)]


MasterFormat: TypeAlias = Literal["float32", "remainder", "remainder8"]
"""Where what a float32 weight has beyond the model's low-precision weight is stored."""

_REMAINDERS: Final[dict[Any, Remainder | None]] = {
    "float32": None,
    "remainder": Remainder(),
    "remainder8": Remainder(8),
}
_MOMENTS: Final[dict[Any, tuple[Codec, Codec]]] = {
    torch.float32: (Identity(), Identity()),
    torch.bfloat16: (Bfloat16(), Bfloat16(stochastic=True)),
    "int8": (Int8Block(), UInt8SqrtBlock()),
}


@dataclass(frozen=True, slots=True)
class StateFormat:
    """The requested storage of weights and moments.

    Args:
        master: ``"float32"``: in a float32 master if there is one (4 bytes per parameter). ``"remainder"``: exactly, by
            a 16-bit remainder in the optimizer's state (2 bytes). ``"remainder8"``: by an 8-bit one (1 byte).
        moments: ``torch.float32`` (8 bytes per parameter), ``torch.bfloat16`` (4) or ``"int8"`` (2 and 1/16).

    Raises:
        ConfigError: another value.

    Example:
        >>> from halfpeak.fused.rules.adam import AdamRule
        >>> StateFormat(moments="int8").of(AdamRule(), squares=(False, True)).state_names
        ('exp_avg', 'exp_avg_scale', 'exp_avg_sq', 'exp_avg_sq_scale')
    """

    master: MasterFormat = "float32"
    moments: torch.dtype | Literal["int8"] = torch.float32

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("master", self.master, _REMAINDERS),
            ("moments", self.moments, _MOMENTS),
        ):
            if value not in tuple(allowed):  # lists have no hash
                raise ConfigError(
                    f"{name}={short_repr(value)} must be one of {', '.join(map(repr, allowed))}"
                )

    @property
    def remainder(self) -> Remainder | None:
        """The codec that splits weights; None for ``"float32"``."""
        return _REMAINDERS[self.master]

    def of(self, rule: Rule, squares: Sequence[bool]) -> Rule:
        """``rule`` with this storage.

        Args:
            rule: a rule that works element by element.
            squares: for each of its state tensors, whether it is a mean of squares and so never negative.
        """
        if self == StateFormat():
            return rule
        codecs = tuple(_MOMENTS[self.moments][square] for square in squares)
        return QuantizedRule(rule, codecs, self.remainder, step_scope=rule.step_scope)
