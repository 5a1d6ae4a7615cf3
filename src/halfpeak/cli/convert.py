"""``halfpeak convert``: writes a checkpoint in another format."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from halfpeak.checkpoint.conversion import Conversion, convert
from halfpeak.checkpoint.formats import TARGETS
from halfpeak.cli.arguments import Arguments
from halfpeak.cli.text import printable


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    given = _parser().parse_args(arguments)
    done = convert(
        given.file,
        given.to.replace("-", "_"),
        given.output,
        drop=[name for names in given.drop for name in names.split(",")],
        scale=given.scale,
        level=given.level,
    )
    sys.stdout.write(_as_text(done))
    return 0


def _parser() -> Arguments:
    forms = "\n".join(f"  {name.replace('_', '-'):<15}{target.brief}" for name, target in TARGETS.items())
    parser = Arguments(
        "convert", f"Write a checkpoint in another format. The input is not changed.\n\nformats:\n{forms}"
    )
    parser.add_argument("file", metavar="FILE", help="a file, or a folder of accelerate")
    parser.add_argument("--to", metavar="FORMAT", required=True, help="the format to write, see above")
    parser.add_argument(
        "-o", "--output", metavar="OUT", required=True, help="a file or folder that does not exist yet"
    )
    parser.add_argument(
        "--drop",
        metavar="NAMES",
        action="append",
        default=[],
        help="entries to leave out, separated by commas; all: every entry that the format cannot hold",
    )
    parser.add_argument(
        "--scale", type=float, metavar="NUMBER", help="the initial loss scale, for a file without one"
    )
    parser.add_argument("--level", metavar="LEVEL", help="the opt level to write, for a file that names none")
    return parser


def _as_text(done: Conversion) -> str:
    lines = [f"{printable(str(done.output))}: {done.target}, from {done.source}: {', '.join(done.kept)}"]
    lines += [f"  dropped   {printable(name)}: {printable(what)}" for name, what in done.dropped.items()]
    return "\n".join([*lines, ""])
