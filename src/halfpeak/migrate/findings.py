"""Findings: places that a person has to look at, each with the reason and what to write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import libcst as cst

from halfpeak.core.errors import HalfpeakError

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


class NotSupported(HalfpeakError):
    """A training loop has a part whose meaning is not certain, so the loop is left as it is.

    Args:
        node: that part.
        code: how the report quotes it.
        reason: why it is not certain.
        write: what to do about it.
    """

    def __init__(self, node: cst.CSTNode, code: str, reason: str, write: str) -> None:
        super().__init__(f"{code}: {reason}; {write}")
        self.node = node
        self.code = code
        self.reason = reason
        self.write = write

    def finding(self, line: int) -> Finding:
        """The same for a report."""
        return Finding(line, self.code, self.reason, self.write)
