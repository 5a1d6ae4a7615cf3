"""The picture of a run: loss, loss scale and gradient norm over the steps, with skipped steps marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfpeak.checkpoint.temporary import replacing
from halfpeak.core.extras import needs_extra
from halfpeak.insight.history import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = "#2f6fb0", "#e07b21", "#3a8f5c", "#c8372d", "#8a8f98"
WIDE_RATIO = 20.0
"""Values that span more than this factor are drawn on a logarithmic axis."""


def save_history(rows: Sequence[Row], path: Path, *, title: str = "", clips: bool = False) -> None:
    """Draw the rows of a history into a PNG file, atomically. A symbolic link at ``path`` is replaced, not followed.

    Args:
        rows: of training steps (``loss``, ``loss_scale``, ``grad_norm``, ``skipped``) and of validations
            (``validation_loss``, ``validation_accuracy``). Values may be None or missing.
        clips: whether the run clips gradients, after the norm was taken.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = history_figure(rows, title=title, clips=clips)
    with replacing(path) as file:
        figure.savefig(file, dpi=150, format="png")


def history_figure(rows: Sequence[Row], *, title: str = "", clips: bool = False) -> Figure:
    """The figure that :func:`save_history` writes. It needs no window and no display."""
    with needs_extra():
        from matplotlib.figure import Figure
    steps = [row for row in rows if "loss" in row]
    skipped = [row["step"] for row in steps if row.get("skipped")]
    # A constant loss scale, as at O0 and with bfloat16, needs no panel.
    moves = len(set(_points(steps, "loss_scale")[1])) > 1
    figure = Figure(figsize=(9, 7.5 if moves else 6), layout="constrained")
    ratios = (2.2, 1, 1.4) if moves else (2.2, 1.4)
    panels = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
    loss, norm = panels[0], panels[-1]
    _draw_loss(loss, steps, rows)
    if moves:
        _draw_scale(panels[1], steps)
    _draw_norm(norm, steps)
    norm.set_ylabel("gradient norm\nbefore clipping" if clips else "gradient norm")
    for axes in panels:
        _dress(axes)
        for step in skipped:
            axes.axvline(step, color=RED, linewidth=0.8, alpha=min(0.5, 10 / len(skipped)), zorder=1)
    if skipped:
        word = "step" if len(skipped) == 1 else "steps"
        panels[1].plot([], [], color=RED, linewidth=0.8, label=f"{len(skipped)} skipped {word}")
        panels[1].legend(loc="best", frameon=False, fontsize=9)
    norm.set_xlabel("optimizer step")
    norm.xaxis.get_major_locator().set_params(integer=True)
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def _draw_loss(axes: Axes, steps: Sequence[Row], rows: Sequence[Row]) -> None:
    x, y = _points(steps, "loss")
    if len(x) > 60:
        axes.plot(x, y, color=BLUE, linewidth=0.6, alpha=0.3)
        axes.plot(x, _smooth(y), color=BLUE, linewidth=1.6, label="training, smoothed")
    else:
        axes.plot(x, y, color=BLUE, linewidth=1.6, label="training")
    x_held, y_held = _points(rows, "validation_loss")
    if x_held:
        axes.plot(x_held, y_held, color=ORANGE, linewidth=1.2, marker="o", markersize=4, label="validation")
    axes.set_ylabel("loss (nats)")
    _scale_axis(axes, [*y, *y_held])
    handles, labels = axes.get_legend_handles_labels()
    x_right, y_right = _points(rows, "validation_accuracy")
    if x_right:
        right = axes.twinx()
        percent = [100 * value for value in y_right]
        handles += right.plot(
            x_right, percent, color=GREY, linestyle="--", linewidth=1.2, marker="o", markersize=3
        )
        labels.append("validation accuracy (right)")
        right.set_ylabel("accuracy (%)")
        right.set_ylim(top=100.5 if max(y_right) > 0.9 else None)
        right.spines["top"].set_visible(False)
    if handles:
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=3,
            borderaxespad=0.2,
            frameon=False,
            fontsize=9,
        )


def _draw_scale(axes: Axes, steps: Sequence[Row]) -> None:
    x, y = _points(steps, "loss_scale")
    axes.step(x, y, color=GREEN, linewidth=1.6, where="post")
    axes.set_ylabel("loss scale")
    if min(y) > 0:
        axes.set_yscale("log", base=2)
        axes.set_ylim(min(y) / 2.8, max(y) * 2.8)


def _draw_norm(axes: Axes, steps: Sequence[Row]) -> None:
    x, y = _points([row for row in steps if not row.get("skipped")], "grad_norm")
    axes.plot(x, y, color=BLUE, linewidth=0.6, alpha=0.35 if len(x) > 60 else 1.0)
    if len(x) > 60:
        axes.plot(x, _smooth(y), color=BLUE, linewidth=1.6)
    _scale_axis(axes, y)


def _points(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """The steps and values of the rows with a finite value of that name."""
    found: list[tuple[int, Any]] = [(row["step"], row.get(name)) for row in rows]
    kept = [(step, float(value)) for step, value in found if value is not None and math.isfinite(value)]
    return [step for step, _ in kept], [value for _, value in kept]


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean of a forward and a backward running mean over a fortieth of the values each, so it does not lag."""
    keep = 1.0 - 1.0 / max(2.0, len(values) / 40)
    ahead, behind = _running_mean(values, keep), _running_mean(values[::-1], keep)[::-1]
    return [(one + other) / 2 for one, other in zip(ahead, behind, strict=True)]


def _running_mean(values: Sequence[float], keep: float) -> list[float]:
    """The exponential mean of the values so far, unbiased at the start."""
    means: list[float] = []
    total = weight = 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        means.append(total / weight)
    return means


def _scale_axis(axes: Axes, values: Sequence[float]) -> None:
    if values and min(values) > 0 and max(values) / min(values) > WIDE_RATIO:
        axes.set_yscale("log")


def _dress(axes: Axes) -> None:
    axes.grid(True, which="major", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
