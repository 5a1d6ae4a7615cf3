"""``halfpeak inspect``: prints the report on a checkpoint as a table, as lines, or as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from halfpeak.checkpoint.inspection import Report, inspect
from halfpeak.cli.arguments import Arguments
from halfpeak.cli.text import console, count, facts_table, printable, size

if TYPE_CHECKING:
    from rich.table import Table

_DESCRIPTION = """Say what is in a checkpoint: who wrote it, at which level, loss scales, masters, optimizers, sizes,
and what is suspicious. Nothing in the file is executed.

Reads what torch.save, halfpeak and safetensors write, folders of accelerate and transformers, and those of halfpeak train."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status: 1 if a file cannot be read, or has findings and no known format."""
    parser = Arguments("inspect", _DESCRIPTION)
    parser.add_argument(
        "file", metavar="FILE", help="a file, a run's folder, or one of accelerate or transformers"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    given = parser.parse_args(arguments)
    report = inspect(given.file)
    if given.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    elif (terminal := console(sys.stdout)) is not None:
        terminal.print(_table(report))
    else:
        sys.stdout.write(as_text(report))
    return 0 if report.readable and (report.form != "unknown" or not report.findings) else 1


def as_text(report: Report) -> str:
    """The report as lines."""
    lines = [f"{label:<12}{text}" for label, text in rows(report)]
    return "\n".join([printable(report.path), *(f"  {line}" for line in lines), ""])


def rows(report: Report) -> Iterator[tuple[str, str]]:
    """The lines of the report, as pairs of label and text. Text from the file is escaped, because it is not trusted."""
    yield "file", f"{report.container}, {size(report.size)}, {report.integrity}"
    yield "made by", printable(report.made_by)
    if report.level is not None:
        yield "level", printable(report.level)
    if report.epoch is not None or report.iteration is not None:
        told = (("epoch", report.epoch), ("iteration", report.iteration))
        yield "progress", ", ".join(f"{name} {value}" for name, value in told if value is not None)
    for model in report.models:
        counted = _dtypes(model.dtypes)
        yield (
            "weights",
            f"{printable(model.where)}: {count(model.tensors, 'tensor')}, {counted}, {size(model.size)}",
        )
    for masters in report.masters:
        yield (
            "masters",
            f"{printable(masters.where)}: {count(masters.tensors, 'tensor')}, {_dtypes(masters.dtypes)}",
        )
    for scaler in report.scalers:
        stands = "impossible" if scaler.scale is None else f"{scaler.scale:g}, {scaler.clean} clean updates"
        yield "loss scale", f"{printable(scaler.where)}: {stands} ({scaler.kind})"
    for optimizer in report.optimizers:
        steps = "" if optimizer.steps is None else f", {count(optimizer.steps, 'step')}"
        rates = ", ".join(f"{rate:g}" for rate in optimizer.lr[:4])
        state = (
            f"; state {_dtypes(optimizer.dtypes)}, {size(optimizer.size)}"
            if optimizer.dtypes
            else "; no state"
        )
        yield (
            "optimizer",
            f"{printable(optimizer.where)}: {count(optimizer.groups, 'group')}, "
            f"{count(optimizer.parameters, 'parameter')}"
            f"{steps}, lr {rates}{state}",
        )
    yield from (("also", f"{printable(name)}: {printable(text)}") for name, text in report.rest.items())
    yield from (("wants", printable(name)) for name in report.wants)
    yield from (("suspicious", printable(text)) for text in report.findings)
    yield from (("advice", text) for text in report.advice)


def _dtypes(dtypes: dict[str, int]) -> str:
    return ", ".join(f"{elements:,} {name}" for name, elements in dtypes.items())


def _table(report: Report) -> Table:
    from rich.text import Text

    table = facts_table(Text(printable(report.path)))
    styles = {"suspicious": "bold red", "wants": "yellow", "advice": "green"}
    last = ""
    for label, text in rows(report):
        table.add_row("" if label == last else label, Text(text, style=styles.get(label, "")))
        last = label
    return table
