"""``halfpeak migrate``: prints the changes to old code as a diff or makes them, and lists what is left to do."""

from __future__ import annotations

import difflib
import io
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfpeak.cli.arguments import Arguments
from halfpeak.cli.text import count
from halfpeak.core.extras import needs_extra

if TYPE_CHECKING:
    from halfpeak.migrate import Migrated

_CHANGED, _FAILED = 1, 2

_EPILOG = """\
targets:
  halfpeak  names of apex and mmcv become halfpeak's or torch's, those of torch.cuda.amp torch.amp's
  torch     the same where torch has a counterpart; what only halfpeak has is listed

Names and entries of configurations change, loops do not: docs/migrate/loops.md shows how to write those.
What is left is listed as FILE:LINE: NAME: REASON; WHAT TO WRITE.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0: success. 1: with ``--check``, a file would change. 2: a file could not be read or written; the other files
        were processed.
    """
    options = _parser().parse_args(arguments)
    # halfpeak.migrate needs libcst, an optional dependency. It is imported here, so that --help works without libcst.
    with needs_extra():
        project: Any = import_module("halfpeak.migrate.project")
    changed, left, unread, failed = 0, 0, 0, False
    for one in project.migrate(project.find([Path(path) for path in options.paths]), options.to):
        if one.result.source != one.old:
            changed += 1
            if options.write:
                failed = not _write(one, project) or failed
            else:
                sys.stdout.write(_diff(one))
        for finding in one.result.findings:
            left += 1
            sys.stderr.write(f"{one.path}:{finding}\n")
        unread += one.result.unreadable
    sys.stderr.write(_summary(changed, left, unread, written=options.write))
    if failed or unread:
        return _FAILED
    return _CHANGED if options.check and changed else 0


def _write(one: Migrated, project: Any) -> bool:
    """Replace a file; if it cannot be written, print the error and return False, so that the other files go on."""
    try:
        project.replace(one.path, one.result.source)
    except OSError as error:
        sys.stderr.write(f"{one.path}: not written (unchanged): {error.strerror}\n")
        return False
    sys.stdout.write(f"rewritten {one.path}\n")
    return True


def _diff(one: Migrated) -> str:
    """A unified diff that ``patch`` and ``git apply`` accept."""
    old, new = (source.decode("utf-8", "backslashreplace") for source in (one.old, one.result.source))
    name = one.path.as_posix().lstrip("/")
    # StringIO splits at newlines only; str.splitlines() would split at ten other characters, too.
    before, after = (list(io.StringIO(text, newline="\n")) for text in (old, new))
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _summary(changed: int, left: int, unread: int, *, written: bool) -> str:
    places = f"{count(left, 'place')} left to look at"
    if unread:
        places += f", {count(unread, 'file')} not read"
    hint = "; --write applies it" if changed and not written else ""
    return f"{count(changed, 'file')} {'rewritten' if written else 'would change'}, {places}{hint}\n"


def _parser() -> Arguments:
    parser = Arguments(
        "migrate", "Rewrite the names of apex, torch.cuda.amp and mmcv in code as those of halfpeak or torch."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="files, or folders with Python files in them"
    )
    parser.add_argument(
        "--to",
        default="halfpeak",
        choices=("halfpeak", "torch"),
        help="whose names to write (default: halfpeak)",
    )
    parser.add_argument(
        "--write", action="store_true", help="change the files; without it nothing is touched"
    )
    parser.add_argument("--check", action="store_true", help="exit with status 1 if something would change")
    return parser
