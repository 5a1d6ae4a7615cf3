"""The fenced blocks of the pages in Markdown."""

from __future__ import annotations

import re

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)$")


def blocks(text: str) -> list[tuple[list[str], int, list[str]]]:
    """The fenced blocks of a page: words after the fence, number of the first line, lines."""
    found: list[tuple[list[str], int, list[str]]] = []
    opened: tuple[str, list[str], int, list[str]] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened = fence["indent"], fence["info"].split(), number + 1, []
        elif opened is not None and fence and not fence["info"].strip():
            found.append(opened[1:])
            opened = None
        elif opened is not None:
            opened[3].append(line.removeprefix(opened[0]))
    assert opened is None, f"the fence of line {opened[2] - 1} is never closed" if opened else ""
    return found


def python_of(text: str, *, run: bool) -> str:
    """The Python blocks of a page on their own line numbers, so that a traceback points into the page."""
    lines = [""] * (text.count("\n") + 1)
    for words, first, code in blocks(text):
        if words[:1] == ["python"] and ("no-run" not in words) is run:
            lines[first - 1 : first - 1 + len(code)] = code
    return "\n".join(lines)
