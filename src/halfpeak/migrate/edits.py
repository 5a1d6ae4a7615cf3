"""Edit: a replacement of a part of a file's text, so that everything else stays as it is, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Edit(NamedTuple):
    """``text[start:end]`` becomes ``new``; with ``start == end``, ``new`` is inserted."""

    start: int
    end: int
    new: str


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits, equal ones once. Insertions at one place come in the order given, and edits inside a removed
    part go with it.

    >>> edited("f(a, b)", [Edit(3, 6, ""), Edit(2, 2, "x, "), Edit(0, 1, "g"), Edit(5, 6, "c")])
    'g(x, a)'
    """
    parts: list[str] = []
    end = 0
    for edit in sorted(dict.fromkeys(edits), key=lambda one: one[:2]):
        if edit.start >= end:
            parts += text[end : edit.start], edit.new
            end = edit.end
    return "".join((*parts, text[end:]))
