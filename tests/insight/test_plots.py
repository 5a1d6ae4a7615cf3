"""The picture of a run shows its scalars and skips, also if values are missing or not finite."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfpeak.insight.history import Row
from halfpeak.insight.plots import history_figure, save_history

PNG = b"\x89PNG\r\n\x1a\n"


def rows(count: int, *, skipped: tuple[int, ...] = ()) -> list[Row]:
    found: list[Row] = []
    scale = 2.0**16
    for step in range(1, count + 1):
        scale /= 2 if step in skipped else 1
        found.append(
            {
                "step": step,
                "loss": 2.0 / step,
                "loss_scale": scale,
                "grad_norm": None if step in skipped else 1.0,
                "skipped": float(step in skipped),
            }
        )
    return found


@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_it_is_a_picture(tmp_path: Path, count: int) -> None:
    save_history(rows(count), tmp_path / "history.png", title="a run")
    assert (tmp_path / "history.png").read_bytes().startswith(PNG)
    assert (tmp_path / "history.png").stat().st_size > 5000


def test_axes_are_labelled_and_skips_are_marked_on_each() -> None:
    figure = history_figure(rows(100, skipped=(1, 2, 50)))
    loss, scale, norm = figure.axes[:3]
    assert [axes.get_ylabel() for axes in (loss, scale, norm)] == [
        "loss (nats)",
        "loss scale",
        "gradient norm",
    ]
    assert norm.get_xlabel() == "optimizer step"
    for axes in (loss, scale, norm):
        marks = [line for line in axes.get_lines() if list(line.get_xdata()) in ([1, 1], [2, 2], [50, 50])]
        assert len(marks) == 3
    assert [text.get_text() for text in scale.get_legend().get_texts()] == ["3 skipped steps"]


def test_a_wide_range_is_logarithmic_and_a_narrow_one_is_not() -> None:
    wide, scale, narrow = history_figure(rows(100, skipped=(3,))).axes[:3]
    assert (wide.get_yscale(), scale.get_yscale(), narrow.get_yscale()) == ("log", "log", "linear")


def test_validation_is_drawn_on_the_same_steps() -> None:
    figure = history_figure([*rows(10), {"step": 10, "validation_loss": 0.5, "validation_accuracy": 0.9}])
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == ["training", "validation", "validation accuracy (right)"]


def test_values_that_are_not_finite_do_not_break_it(tmp_path: Path) -> None:
    broken = [{"step": 1, "loss": float("nan"), "loss_scale": 0.0, "grad_norm": float("inf"), "skipped": 1.0}]
    save_history([*broken, *rows(3)], tmp_path / "history.png")
    assert (tmp_path / "history.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("count", [2, 3, 7, 20, 500])
def test_ticks_stand_at_whole_steps(count: int) -> None:
    figure = history_figure(rows(count))
    figure.canvas.draw()
    assert all(tick == round(tick) for tick in figure.axes[-1].get_xticks())


def test_a_single_validation_is_seen() -> None:
    figure = history_figure([*rows(10), {"step": 10, "validation_loss": 0.5, "validation_accuracy": 0.9}])
    for axes in (figure.axes[0], figure.axes[-1]):
        (line,) = [line for line in axes.get_lines() if list(line.get_xdata()) == [10]]
        assert line.get_marker() == "o"


def test_a_loss_scale_that_never_moves_has_no_panel() -> None:
    assert [axes.get_ylabel() for axes in history_figure(rows(10)).axes] == [
        "loss (nats)",
        "gradient norm",
    ]


def test_what_is_smoothed_does_not_lag() -> None:
    falling = [{**row, "loss": 400.0 - row["step"]} for row in rows(400)]
    raw, smoothed = history_figure(falling).axes[0].get_lines()[:2]
    assert smoothed.get_ydata()[200] == pytest.approx(raw.get_ydata()[200], abs=0.5)
