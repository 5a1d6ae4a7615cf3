"""Finding: one place that a person has to look at, with the reason and what to write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from halfpeak.core.errors import ConfigError

Target = Literal["halfpeak", "amp", "torch"]
"""What code is rewritten to: the native API, ``halfpeak.amp`` (apex's names), or ``torch.amp`` alone."""

TARGETS: Final[tuple[Target, ...]] = get_args(Target)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something was left as it is, and what to write instead."""

    reason: str
    write: str


@dataclass(frozen=True, order=True, slots=True)
class Finding:
    """One place that was not rewritten.

    Attributes:
        line: in the text that was given, counted from 1.
        code: what stands there.
        reason: why it was left as it is.
        write: what to do about it.
    """

    line: int
    code: str
    reason: str
    write: str

    def __str__(self) -> str:
        return f"{self.line}: {self.code}: {self.reason}; {self.write}"


def parse_target(value: str) -> Target:
    """The target of that name.

    Raises:
        ConfigError: there is none.

    >>> parse_target("amp")
    'amp'
    """
    for target in TARGETS:
        if value == target:
            return target
    raise ConfigError(f"--to {value!r} must be one of {', '.join(TARGETS)}")
