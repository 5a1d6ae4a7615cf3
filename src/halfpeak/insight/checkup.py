"""Checkup: the result of halfpeak.doctor as a value, a table, a picture and a page."""

from __future__ import annotations

import html
import math
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from halfpeak.core.errors import ConfigError
from halfpeak.core.extras import needs_extra
from halfpeak.core.finite_json import finite_json

HEADER: Final = ("level", "loss", "distance", "skipped", "ms/step", "B/param", "underflow", "unchanged")

SUFFIXES: Final = (".html", ".png", ".json")
"""What a checkup can be saved as."""

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
        seconds: the time of a step; nan if the level does not train as well as float32, or if the machine was too busy
            to time it.
        bytes_per_parameter: memory that engine and optimizer hold after a step, per parameter.
        underflow: the share of gradient elements that are zero, minus the share in float32.
        unchanged: the share of weights that have a gradient but did not change in a step, minus the share in float32.
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
    underflow: float = 0.0
    unchanged: float = 0.0
    keep_fp32: tuple[str, ...] = ()
    against: str = ""


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """The result of :func:`halfpeak.doctor`. ``print`` shows a table of at most 80 columns.

    Attributes:
        level: the level to use.
        keep_fp32: the layers that must stay float32 at this level.
        probes: one per tried level.
        reference: the float32 run.
        spread: the largest difference in final loss between float32 runs of other seeds and the reference, or 1 % of
            the reference's final loss if that is more.
        device: what it was measured on, by its name.
        versions: of halfpeak, torch and Python.
        date: the day and minute with the zone, such as ``2026-11-28 14:05+00:00``.
    """

    level: str
    keep_fp32: tuple[str, ...]
    reason: str
    probes: tuple[Probe, ...]
    reference: Probe
    spread: float
    device: str
    versions: str
    date: str

    @property
    def line(self) -> str:
        """The line of code to write."""
        kept = f", keep_fp32={list(self.keep_fp32)!r}" if self.keep_fp32 else ""
        return f"engine = halfpeak.prepare(model, optimizer, {self.level!r}{kept})"

    def __str__(self) -> str:
        rows = [HEADER, *map(_numbers, self.probes)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        table = [
            "  ".join([
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ])
            for row in rows
        ]  # fmt: skip
        lines = [_wrapped(f"{probe.level}  {self._outcome(probe)}", indent=4) for probe in self.probes]
        return "\n".join([
            _wrapped(f"{self.level}: {self.reason}."), "", *table, "", *lines, "", _wrapped(self.line, 4), "",
            _wrapped(self._measured),
        ])  # fmt: skip

    @property
    def _measured(self) -> str:
        return f"Measured on {self.device} with {self.versions} at {self.date}."

    def _outcome(self, probe: Probe) -> str:
        kept = f", with {', '.join(probe.keep_fp32)} in float32" if probe.keep_fp32 else ""
        return probe.against or (f"use it{kept}" if probe.level == self.level else f"trains as well{kept}")

    def save(self, path: str | Path) -> None:
        """Write a page (``.html``), a picture (``.png``, with the extra "plots") or all numbers (``.json``).

        Raises:
            ConfigError: another suffix, or there is no such folder.
            MissingExtraError: matplotlib is not installed.
        """
        path = require_writable(path)
        if path.suffix == ".html":
            path.write_text(self.to_html(), encoding="utf-8")
        elif path.suffix == ".json":
            path.write_text(self.to_json(), encoding="utf-8")
        else:
            self._figure().savefig(path, dpi=150)

    def to_json(self) -> str:
        """All fields. Non-finite numbers become null, because JSON has none."""
        return finite_json({"line": self.line, **asdict(self)}, indent=1)

    def to_html(self) -> str:
        """A page that needs no other file and no network."""
        rows = "".join(
            f'<tr class="{"use" if probe.level == self.level else "no" if probe.against else ""}">'
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in (*_numbers(probe), self._outcome(probe)))
            + "</tr>"
            for probe in self.probes
        )
        return _PAGE.format(
            title=html.escape(f"{self.level}: {self.reason}."),
            line=html.escape(self.line),
            measured=html.escape(self._measured),
            header="".join(f"<th>{name}</th>" for name in (*HEADER, "verdict")),
            rows=rows,
            picture=_curves(self.probes),
            data=self.to_json().replace("</", "<\\/"),
        )

    def _figure(self) -> Any:
        figure = _figure_class()(figsize=(10, 4.2), layout="constrained")
        timed = [probe for probe in self.probes if math.isfinite(probe.seconds)]
        curves, *others = figure.subplots(
            1, 2 if timed else 1, width_ratios=(2, 1) if timed else (1,), squeeze=False
        )[0]
        for probe in self.probes:
            curves.plot(
                range(1, len(probe.losses) + 1), probe.losses, color=COLORS[probe.level], label=probe.level
            )
        curves.set(xlabel="training step", ylabel="loss", yscale="log" if _is_wide(self.probes) else "linear")
        curves.legend(frameon=False)
        for bars in others:
            names = [probe.level for probe in timed]
            bars.barh(names, [1e3 * probe.seconds for probe in timed], color=[COLORS[n] for n in names])
            bars.set(xlabel="time of a step (ms)", ylabel="level")
            bars.invert_yaxis()
        for axes in (curves, *others):
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(self.line, family="monospace", fontsize=10)
        return figure


def require_writable(path: str | Path) -> Path:
    """``path``, if :meth:`Checkup.save` can write it.

    Raises:
        ConfigError: another suffix, or there is no such folder.
        MissingExtraError: a picture needs matplotlib, which is not installed.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{str(path)!r} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if not path.parent.is_dir():
        raise ConfigError(f"{str(path)!r} cannot be written: there is no directory {str(path.parent)!r}")
    if path.suffix == ".png":
        _figure_class()
    return path


def _figure_class() -> Any:
    with needs_extra():
        from matplotlib.figure import Figure
    return Figure


def _numbers(probe: Probe) -> tuple[str, ...]:
    return (
        probe.level,
        f"{probe.final:.4g}",
        f"{probe.distance:z.2f}" if abs(probe.distance) < 1000 else f"{probe.distance:.0e}",
        str(probe.skipped),
        f"{1e3 * probe.seconds:.3g}" if math.isfinite(probe.seconds) else "-",
        f"{probe.bytes_per_parameter:.1f}",
        f"{probe.underflow:.0%}",
        f"{probe.unchanged:.0%}",
    )


def _wrapped(text: str, indent: int = 0) -> str:
    return textwrap.fill(
        text, 80, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )


# The picture of the page: losses over steps.

LEFT, BOTTOM, WIDTH, HEIGHT = 70, 44, 960, 300
WIDE_RATIO = 20.0
"""Losses that span more than this factor are drawn on a logarithmic axis."""


def _losses(probes: tuple[Probe, ...]) -> list[float]:
    return [loss for probe in probes for loss in probe.losses if math.isfinite(loss)]


def _is_wide(probes: tuple[Probe, ...]) -> bool:
    found = _losses(probes)
    return bool(found) and min(found) > 0 and max(found) / min(found) > WIDE_RATIO


def _curves(probes: tuple[Probe, ...]) -> str:
    found, is_wide = _losses(probes) or [0.0, 1.0], _is_wide(probes)
    scale = math.log10 if is_wide else float
    low, high = scale(min(found)), scale(max(found))
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    steps = max((len(probe.losses) for probe in probes), default=1)

    def x(step: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - 10) * (step - 1) / max(steps - 1, 1):.1f}"

    def y(value: float) -> str:
        return f"{10 + (HEIGHT - BOTTOM - 10) * (high - value) / (high - low):.1f}"

    label = "loss, logarithmic" if is_wide else "loss"
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Loss after each training step">']
    for value in _decades(low, high) if is_wide else _ticks(low, high):
        shown = f"{10**value if is_wide else value:.3g}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(
            f'<text class="axis" x="{LEFT - 8}" y="{y(value)}" dy="4" text-anchor="end">{shown}</text>'
        )
    for step in _ticks(1, steps, least=1.0):
        parts.append(
            f'<text class="axis" x="{x(step)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step:g}</text>'
        )
    parts.append(
        f'<text class="axis" x="{WIDTH // 2}" y="{HEIGHT - 6}" text-anchor="middle">training step</text>'
    )
    middle = (HEIGHT - BOTTOM) // 2
    parts.append(
        f'<text class="axis" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{label}</text>'
    )
    for number, probe in enumerate(probes):
        points = " ".join(
            f"{x(step)},{y(scale(loss))}" for step, loss in enumerate(probe.losses, 1) if math.isfinite(loss)
        )
        color = COLORS[probe.level]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        left = WIDTH - 40 * (len(probes) - number)
        parts.append(f'<text x="{left}" y="22" fill="{color}" font-weight="bold">{probe.level}</text>')
    return "".join([*parts, "</svg>"])


def _ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """At most eleven round numbers between two numbers, at least ``least`` apart."""
    unit = 10.0 ** math.floor(math.log10((high - low) or 1))
    step = max(least, next(size * unit for size in (0.1, 0.2, 0.5, 1) if (high - low) / (size * unit) <= 10))
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """The logarithms of round numbers between two logarithms."""
    parts = (1, 2, 5) if high - low < 4 else (1,)
    every = [
        decade + math.log10(part) for decade in range(math.floor(low), math.ceil(high)) for part in parts
    ]
    return [value for value in every if low <= value <= high]


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>halfpeak doctor</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; color: #1d2329; }}
h1 {{ font-size: 1.2rem; }} code {{ background: #f0f5fb; padding: .3rem .6rem; border-left: 4px solid #2f6fb0; }}
table {{ border-collapse: collapse; margin: 1rem 0; }} td, th {{ padding: .25rem .6rem; text-align: right; }}
td:first-child, td:last-child, th:first-child, th:last-child {{ text-align: left; }}
svg text {{ font: 12px system-ui, sans-serif; }} svg .axis {{ fill: #5b616a; }} svg .grid {{ stroke: #e6e8eb; }}
tr {{ border-bottom: 1px solid #e6e8eb; }} .use {{ font-weight: bold; }} .no {{ color: #8a8f98; }}
</style></head><body>
<h1>{title}</h1>
<p><code>{line}</code></p>
<p>{measured}</p>
<table><tr>{header}</tr>{rows}</table>
{picture}
<script type="application/json" id="checkup">{data}</script>
</body></html>
"""
