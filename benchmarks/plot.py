"""Draws docs/_static/benchmarks/*.svg and fills in the tables of docs/benchmarks.md, all from benchmarks/results/*.csv."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from _page import Rows, by_seed, fill, load, load_gpu, load_quality
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parent.parent / "docs"
PICTURES = DOCS / "_static" / "benchmarks"
OURS, OTHERS, BASE, INK = "#2f6fb0", "#a9afb9", "#6b717c", "#7b828c"
OVERVIEW = {
    "gpu_step": (
        "a transformer, 300 tensors",
        "what follows the backward pass, 1.0 B parameters",
        *("GradScaler, float32, AdamW(fused=True)", "by hand, AdamW(fused=True)"),
        *("halfpeak O2, AdamW(fused=True)", "halfpeak O2, FusedAdamW"),
    ),
    "gpu_training": (
        "GPT-2 124 M, 8 x 1024, float16",
        "a whole training step of GPT-2, 124 M, float16",
        *("float32 with TF32", "native: autocast, scaler, clip, AdamW(fused=True)"),
        *("halfpeak O2, AdamW(fused=True)", "halfpeak O2, FusedAdamW", "halfpeak O2, FusedAdamW, captured"),
    ),
}
"""The first picture: by question, the start of the case's name, the title, and the variants in their order."""
WIDTH = 8.0
"""The width of a picture in inches, at which its letters are as large as those of the page."""
WIDEST = 2.6
"""Bars of larger ratios are cut off; the ratio is written beside the bar."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", default="svg", help="of the pictures: svg, png")
    options = parser.parse_args()
    # With a fixed salt, the same figures give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "halfpeak", "font.size": 9, "font.family": "DejaVu Sans"})
    # Text is legible on a white page and on a dark one.
    grey = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    matplotlib.rcParams.update({**dict.fromkeys(grey, INK), "savefig.transparent": True})
    results = load()
    PICTURES.mkdir(parents=True, exist_ok=True)
    pictures = {question: draw(question, rows) for question, rows in results.items()}
    pictures["overview"], pictures["quality"] = overview_figure(load_gpu()), quality_figure(load_quality())
    for question, figure in pictures.items():
        metadata = {"Date": None} if options.format == "svg" else None
        figure.savefig(PICTURES / f"{question}.{options.format}", metadata=metadata, dpi=110)
    page = DOCS / "benchmarks.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), results), encoding="utf-8")


def draw(question: str, rows: Rows) -> Figure:
    """The picture of a question, on the CPU, where O2 has bfloat16 weights."""
    rows = [{**row, "variant": row["variant"].replace("O2", "O2 in bfloat16")} for row in rows]
    if question == "compile":
        names = [f"{row['case']}: {row['variant']}" for row in rows]
        return plain_figure(
            rows, names, ("s", "min_s", "max_s"), 5.0, "seconds of the first step (dashed: 5)"
        )
    if question == "memory":
        names = [row["variant"] for row in rows]
        return plain_figure(rows, names, ("bytes", "bytes", "bytes"), None, "bytes a parameter")
    return ratio_figure(rows)


def overview_figure(results: dict[str, Rows]) -> Figure:
    """The picture of the first page: a step and a training step on a GPU, beside the usual alternatives."""
    panels: list[tuple[str, Rows]] = []
    for question, (case, title, *variants) in OVERVIEW.items():
        rows = {row["variant"]: row for row in results[question] if row["case"].startswith(case)}
        panels.append((title, [rows[variant] for variant in variants]))
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    heights = [len(rows) for _, rows in panels]
    for axes, (title, rows) in zip(figure.subplots(2, 1, height_ratios=heights), panels, strict=True):
        draw_ratios(axes, rows, room=1.4)
        axes.set_title(title, fontsize=10, fontweight="bold", loc="left")
        axes.set_xlabel(f"time, as a multiple of the dark bar's; {rows[0]['device']}", fontsize=8)
    return figure


def ratio_figure(rows: Rows) -> Figure:
    """A panel for each case: the time of each variant as a multiple of the baseline's, with quartiles.

    Two consecutive cases with the same variants stand side by side and share the names.
    """
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines: list[list[Rows]] = []
    for case in cases:
        panel = [row for row in rows if row["case"] == case]
        if lines and len(lines[-1]) == 1 and _variants(lines[-1][0]) == _variants(panel):
            lines[-1].append(panel)
        else:
            lines.append([panel])
    tallest = [len(line[0]) for line in lines]
    figure = Figure(figsize=(WIDTH, sum(0.24 * count + 0.95 for count in tallest)), layout="constrained")
    grid = figure.subplots(len(lines), 2, squeeze=False, height_ratios=[count + 3 for count in tallest])
    for places, line in zip(grid, lines, strict=True):
        for axes, panel in zip(places, line, strict=False):
            draw_ratios(axes, panel)
        if len(line) == 2:
            places[1].set_yticks([])
        else:
            places[1].set_visible(False)
    return figure


def _variants(rows: Rows) -> list[str]:
    return [row["variant"] for row in rows]


def draw_ratios(axes: Axes, rows: Rows, *, room: float = 2.1) -> None:
    """Bars of ratios. The axis is ``room`` times as long as the longest, for what is written beside the bars."""
    base = next(row["variant"] for row in rows if row["ratio"] == "1.0")
    widths = [min(float(row["ratio"]), WIDEST) for row in rows]
    end = min(max(*widths, 1.0), WIDEST) * room
    bars(axes, [row["variant"] for row in rows], widths, base)
    for at, row in enumerate(rows):
        low, middle, high = (float(row[name]) for name in ("ratio_q1", "ratio", "ratio_q3"))
        if middle <= WIDEST:
            axes.plot([low, min(high, WIDEST)], [at, at], color=INK, linewidth=1.2)
        more = " (cut)" if middle > WIDEST else ""
        axes.text(
            max(min(high, WIDEST), widths[at], 1.0) + 0.02 * end,
            at,
            f"{middle:.2f}x, {_ms(row['ms'])}{more}",
            va="center",
            fontsize=8,
            color=INK,
        )
    axes.axvline(1.0, color=BASE, linewidth=0.8, linestyle="--", zorder=0)
    axes.set_xlim(0, end)
    axes.set_title("\n".join(textwrap.wrap(rows[0]["case"], 28)), fontsize=9.5, fontweight="bold", loc="left")
    axes.set_xlabel("time, as a multiple of the dark bar's", fontsize=8)


def plain_figure(
    rows: Rows, names: Sequence[str], columns: tuple[str, str, str], limit: float | None, unit: str
) -> Figure:
    """A bar for each row. The columns are the value, which is the bar's length, and the ends of its error line."""
    figure = Figure(figsize=(WIDTH, 0.6 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    values, lows, highs = ([float(row[column]) for row in rows] for column in columns)
    bars(axes, names, values, "")
    for at, (value, low, high) in enumerate(zip(values, lows, highs, strict=True)):
        axes.plot([low, high], [at, at], color=INK, linewidth=1.2)
        axes.text(high + max(highs) * 0.01, at, f"{value:.2f}", va="center", fontsize=8, color=INK)
    if limit is not None:
        axes.axvline(limit, color=BASE, linewidth=0.8, linestyle="--", zorder=0)
    axes.set_xlabel(unit, fontsize=8)
    axes.set_xlim(0, max(*highs, limit or 0.0) * 1.12)
    return figure


def quality_figure(rows: Rows) -> Figure:
    """The losses over the steps, of the first seed; and what each variant has more than the first, over all seeds."""
    curves = by_seed(rows)
    (base_name, base), *others = curves.items()
    steps = sorted({int(row["step"]) for row in rows})
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    losses, differences = figure.subplots(1, 2)
    losses.plot(steps, base["0"], color=BASE, linewidth=1.4, label=base_name)
    losses.set_ylabel("loss, nats a byte", fontsize=8)
    differences.axhline(0.0, color=BASE, linewidth=1.4)
    differences.set_ylabel("more than with float32, same seed", fontsize=8)
    for (name, by), style in zip(others, ("-", "--", ":"), strict=True):
        losses.plot(steps, by["0"], color=OURS, linewidth=1.1, linestyle=style, label=name)
        each = [[mine - its for mine, its in zip(by[seed], base[seed], strict=True)] for seed in by]
        means = [sum(at) / len(at) for at in zip(*each, strict=True)]
        differences.plot(steps, means, color=OURS, linewidth=1.1, linestyle=style)
    for axes in (losses, differences):
        axes.set_xlabel("steps", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    losses.legend(fontsize=8, frameon=False)
    return figure


def bars(axes: Axes, names: Sequence[str], values: Sequence[float], base: str) -> None:
    """Horizontal bars from the top down, halfpeak's in colour."""
    ours = ("halfpeak", "FusedAdamW")
    colours = [
        BASE if name == base else OURS if any(word in name for word in ours) else OTHERS for name in names
    ]
    axes.barh(range(len(names)), values, color=colours, height=0.68)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _ms(value: str) -> str:
    number = float(value)
    return f"{number:.2f} ms" if number < 10 else f"{number:.1f} ms" if number < 100 else f"{number:.0f} ms"


if __name__ == "__main__":
    main()
