"""Findings: places in a file that a person has to look at, each with the reason and what to write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

Target = Literal["halfpeak", "torch"]
"""The names that rewritten code uses: halfpeak's, or those of ``torch.amp`` alone."""

TARGETS: Final[tuple[Target, ...]] = get_args(Target)


class Refusal(NamedTuple):
    """The reason why code was not rewritten, and what to write instead."""

    reason: str
    write: str


@dataclass(frozen=True, order=True, slots=True)
class Finding:
    """One place that was not rewritten, or that a person has to check.

    Attributes:
        line: the line in the original text, counted from 1.
        code: the code there.
        reason: why a person has to look at it.
        write: what to write or do instead.
    """

    line: int
    code: str
    reason: str
    write: str

    def __str__(self) -> str:
        return f"{self.line}: {self.code}: {self.reason}; {self.write}"
