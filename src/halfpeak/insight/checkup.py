"""Checkup: the result of halfpeak.doctor as a value, a table, a picture and a page."""

from __future__ import annotations

import html
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from halfpeak.core.errors import ConfigError
from halfpeak.core.extras import needs_extra
from halfpeak.core.finite_json import finite_json

if TYPE_CHECKING:
    from rich.table import Table

HEADER: Final = (
    "level",
    "loss",
    "distance",
    "skipped",
    "ms/step",
    "bytes/param",
    "vanish",
    "unmoved",
    "verdict",
)

COLORS: Final = {
    "O0": "#1d2329", "O1": "#e07b21", "O2": "#c8372d", "O3": "#8a8f98", "O4": "#3a8f5c", "O5": "#2f6fb0",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A short run at an opt level.

    Attributes:
        losses: the first loss after each step.
        final: the mean of ``losses`` over the last quarter of the steps.
        distance: ``final`` minus float32's, divided by the spread of the loss; the largest magnitude of several losses.
        seconds: the time of the fastest step that was not skipped.
        bytes_per_parameter: memory that engine and optimizer hold after a step, per parameter.
        vanished: the share of gradient elements that are zero, minus the share in float32.
        unmoved: the share of weights that have a gradient but did not change in a step, minus the share in float32.
        keep_fp32: the layers that were kept in float32.
        against: the reason not to use the level; empty if it trains as well as float32.
    """

    level: str
    losses: tuple[float, ...] = ()
    final: float = math.nan
    distance: float = math.nan
    skipped: int = 0
    seconds: float = math.nan
    bytes_per_parameter: float = math.nan
    vanished: float = 0.0
    unmoved: float = 0.0
    keep_fp32: tuple[str, ...] = ()
    against: str = ""


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """The result of :func:`halfpeak.doctor`. ``print`` shows a table; rich's ``print`` a formatted one.

    Attributes:
        level: the level to use.
        keep_fp32: the layers that must stay float32 at this level.
        probes: one per tried level.
        reference: the float32 run.
        spread: the largest difference in final loss between float32 runs of other seeds and the reference, or 1 % of
            the reference's final loss if that is more.
    """

    level: str
    keep_fp32: tuple[str, ...]
    reason: str
    probes: tuple[Probe, ...]
    reference: Probe
    spread: float

    @property
    def line(self) -> str:
        """The line of code to write."""
        kept = f", keep_fp32={list(self.keep_fp32)!r}" if self.keep_fp32 else ""
        return f"engine = halfpeak.prepare(model, optimizer, {self.level!r}{kept})"

    def __str__(self) -> str:
        rows = [HEADER, *map(self._row, self.probes)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER) - 1)]
        lines = [
            "  ".join([
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)),
                row[-1],
            ])
            for row in rows
        ]  # fmt: skip
        return "\n".join([f"{self.level}: {self.reason}.", "", *lines, "", self.line])

    def __rich__(self) -> Table:
        """The table that rich prints."""
        with needs_extra():
            from rich.table import Table
        table = Table(title=f"{self.level}: {self.reason}", caption=self.line, title_justify="left")
        for name in HEADER:
            table.add_column(name, justify="left" if name in ("level", "verdict") else "right")
        for probe in self.probes:
            style = "bold green" if probe.level == self.level else "dim" if probe.against else None
            table.add_row(*self._row(probe), style=style)
        return table

    def _row(self, probe: Probe) -> tuple[str, ...]:
        kept = f", with {', '.join(probe.keep_fp32)} in float32" if probe.keep_fp32 else ""
        verdict = probe.against or (f"use it{kept}" if probe.level == self.level else f"trains as well{kept}")
        return (
            probe.level,
            f"{probe.final:.4g}",
            f"{probe.distance:.2f}",
            str(probe.skipped),
            f"{1e3 * probe.seconds:.2f}",
            f"{probe.bytes_per_parameter:.1f}",
            f"{probe.vanished:.0%}",
            f"{probe.unmoved:.0%}",
            verdict,
        )

    def save(self, path: str | Path) -> None:
        """Write a page (``.html``), a picture (``.png``, with the extra "plots") or all numbers (``.json``).

        Raises:
            ConfigError: another suffix.
            MissingExtraError: matplotlib is not installed.
        """
        path = Path(path)
        if path.suffix == ".html":
            path.write_text(self.to_html(), encoding="utf-8")
        elif path.suffix == ".json":
            path.write_text(self.to_json(), encoding="utf-8")
        elif path.suffix == ".png":
            self._figure().savefig(path, dpi=150)
        else:
            raise ConfigError(f"{str(path)!r} must end in .html, .png or .json")

    def to_json(self) -> str:
        """All fields. Non-finite numbers become null, because JSON has none."""
        return finite_json({"line": self.line, **asdict(self)}, indent=1)

    def to_html(self) -> str:
        """A page that needs no other file and no network."""
        rows = "".join(
            f'<tr class="{"use" if probe.level == self.level else "no" if probe.against else ""}">'
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in self._row(probe))
            + "</tr>"
            for probe in self.probes
        )
        return _PAGE.format(
            title=html.escape(f"{self.level}: {self.reason}."),
            line=html.escape(self.line),
            header="".join(f"<th>{name}</th>" for name in HEADER),
            rows=rows,
            picture=_curves(self.probes),
            data=self.to_json().replace("</", "<\\/"),
        )

    def _figure(self) -> Any:
        with needs_extra():
            from matplotlib.figure import Figure
        figure = Figure(figsize=(10, 4), layout="constrained")
        curves, bars = figure.subplots(1, 2, width_ratios=(2, 1))
        for probe in self.probes:
            curves.plot(probe.losses, color=COLORS[probe.level], label=probe.level)
        curves.set(xlabel="step", ylabel="loss")
        curves.legend(frameon=False)
        names = [probe.level for probe in self.probes]
        bars.barh(names, [1e3 * probe.seconds for probe in self.probes], color=[COLORS[n] for n in names])
        bars.set(xlabel="ms per step")
        bars.invert_yaxis()
        figure.suptitle(self.line, family="monospace", fontsize=10)
        return figure


WIDTH, HEIGHT = 960, 260


def _curves(probes: tuple[Probe, ...]) -> str:
    finite = [loss for probe in probes for loss in probe.losses if math.isfinite(loss)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    longest = max((len(probe.losses) for probe in probes), default=1)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 24}" role="img" aria-label="Loss after each step">']
    for number, probe in enumerate(probes):
        points = " ".join(
            f"{WIDTH * step / max(longest - 1, 1):.1f},{HEIGHT * (high - loss) / ((high - low) or 1):.1f}"
            for step, loss in enumerate(probe.losses)
            if math.isfinite(loss)
        )
        color = COLORS[probe.level]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        parts.append(f'<text x="{60 * number}" y="{HEIGHT + 20}" fill="{color}">{probe.level}</text>')
    return "".join([*parts, "</svg>"])


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>halfpeak doctor</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; color: #1d2329; }}
h1 {{ font-size: 1.2rem; }} code {{ background: #f0f5fb; padding: .3rem .6rem; border-left: 4px solid #2f6fb0; }}
table {{ border-collapse: collapse; margin: 1rem 0; }} td, th {{ padding: .25rem .6rem; text-align: right; }}
td:first-child, td:last-child, th:first-child, th:last-child {{ text-align: left; }}
tr {{ border-bottom: 1px solid #e6e8eb; }} .use {{ font-weight: bold; }} .no {{ color: #8a8f98; }}
</style></head><body>
<h1>{title}</h1>
<p><code>{line}</code></p>
<table><tr>{header}</tr>{rows}</table>
{picture}
<script type="application/json" id="checkup">{data}</script>
</body></html>
"""
