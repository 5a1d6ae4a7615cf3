"""Findings: places in a file that a person has to look at, each with the reason and what to write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import libcst as cst

from halfpeak.core.errors import HalfpeakError

Target = Literal["halfpeak", "amp", "torch"]
"""The API that rewritten code uses: halfpeak's own, ``halfpeak.amp`` (apex's names), or ``torch.amp`` alone."""

TARGETS: Final[tuple[Target, ...]] = get_args(Target)


@dataclass(frozen=True, slots=True)
class Refusal:
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


class NotSupported(HalfpeakError):
    """A part of a training loop has no certain meaning, so the loop is not rewritten.

    Args:
        node: the part.
        code: the part as the report quotes it.
        reason: why the meaning is not certain.
        write: what to write or do instead.
    """

    def __init__(self, node: cst.CSTNode, code: str, reason: str, write: str) -> None:
        super().__init__(f"{code}: {reason}; {write}")
        self.node, self.code, self.reason, self.write = node, code, reason, write

    def finding(self, line: int) -> Finding:
        """The finding for the report."""
        return Finding(line, self.code, self.reason, self.write)
