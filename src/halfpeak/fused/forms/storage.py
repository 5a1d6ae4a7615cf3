"""Storage: what a user asks of the forms that weights and moments are stored in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch

from halfpeak.core.errors import ConfigError
from halfpeak.fused.forms.codecs import Bfloat16, Codec, Remainder, Signed8, Squares8, Whole
from halfpeak.fused.forms.stored import Stored
from halfpeak.fused.rules.base import Rule

Master: TypeAlias = Literal["float32", "remainder", "remainder8"]
"""Where the digits of a bfloat16 weight are that the model does not see."""

_REMAINDERS: Final[dict[Any, Remainder | None]] = {
    "float32": None,
    "remainder": Remainder(),
    "remainder8": Remainder(8),
}
_MOMENTS: Final[dict[Any, tuple[Codec, Codec]]] = {
    torch.float32: (Whole(), Whole()),
    torch.bfloat16: (Bfloat16(), Bfloat16(by_chance=True)),
    "int8": (Signed8(), Squares8()),
}


@dataclass(frozen=True, slots=True)
class Storage:
    """A wish, checked.

    Args:
        master: ``"float32"``: in a float32 master, where there is one (4 bytes per parameter). ``"remainder"``: in a
            16-bit remainder in the optimizer's state, exactly (2 bytes). ``"remainder8"``: the first 8 bits of it (1 byte).
        moments: ``torch.float32`` (8 bytes per parameter), ``torch.bfloat16`` (4) or ``"int8"`` (2 and 1/16).

    Raises:
        ConfigError: neither of these.

    Example:
        >>> from halfpeak.fused.rules.adam import AdamRule
        >>> Storage(moments="int8").of(AdamRule(), squares=(False, True)).slots
        ('exp_avg', 'exp_avg_scale', 'exp_avg_sq', 'exp_avg_sq_scale')
    """

    master: Master = "float32"
    moments: torch.dtype | Literal["int8"] = torch.float32

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("master", self.master, _REMAINDERS),
            ("moments", self.moments, _MOMENTS),
        ):
            if value not in allowed:
                raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")

    @property
    def remainder(self) -> Remainder | None:
        """How weights are split, if they are."""
        return _REMAINDERS[self.master]

    def of(self, rule: Rule, squares: Sequence[bool]) -> Rule:
        """``rule`` in these forms.

        Args:
            rule: that goes element by element.
            squares: which of its slots are means of squares, never negative.
        """
        if self == Storage():
            return rule
        codecs = tuple(_MOMENTS[self.moments][square] for square in squares)
        return Stored(rule, codecs, self.remainder)
