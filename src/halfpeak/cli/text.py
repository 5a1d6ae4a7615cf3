"""Output to a terminal: rich's console, and the formatting of untrusted text, counts, sizes and speeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

from halfpeak.core.extras import needs_extra

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_LONGEST: Final = 400


def console(stream: TextIO) -> Console | None:
    """A console of rich for a stream; None if the stream is no terminal or rich is not installed."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    return Console(file=stream)


def facts_table(title: str | Text) -> Table:
    """An empty table of rich for pairs of label and text."""
    with needs_extra():
        from rich import box
        from rich.table import Table
    table = Table(box=box.ROUNDED, show_header=False, title=title)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def printable(text: str) -> str:
    """Text from a file, with unprintable characters escaped, cut to 400 characters.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    shown = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."


def count(number: int, what: str) -> str:
    """A number with its noun, in the plural if needed.

    >>> count(1, "tensor"), count(2000, "tensor")
    ('1 tensor', '2,000 tensors')
    """
    return f"{number:,} {what}{'s' * (number != 1)}"


def size(number: int) -> str:
    """A number of bytes in a suitable unit.

    >>> size(72), size(5 * 2**20)
    ('72 B', '5.0 MiB')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >= 2**power:
            return f"{number / 2**power:.1f} {unit}"
    return f"{number} B"


def short(number: float) -> str:
    """A number with three digits and a suffix for thousands, millions or billions.

    >>> short(12345.0), short(999.0), short(2.5e6)
    ('12.3k', '999', '2.5M')
    """
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{suffix}"
    return f"{number:.3g}"
