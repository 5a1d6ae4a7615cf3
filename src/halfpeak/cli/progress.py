"""The progress output of a run: a live display in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from halfpeak.cli.text import short
from halfpeak.core.extras import needs_extra
from halfpeak.insight.history import Row
from halfpeak.recipes.loop import Reporter
from halfpeak.recipes.training import Training

if TYPE_CHECKING:
    from rich.console import Console

LINES = 20
"""The approximate number of lines that a whole run prints without a terminal."""


@contextmanager
def progress(console: Console, run: Training) -> Generator[Reporter]:
    """The reporter for a console: a live display for a terminal, else plain lines."""
    if not console.is_terminal:
        yield PlainLines(console, run)
        return
    with needs_extra():
        from rich.live import Live
    display = LiveDisplay(console, run)
    with Live(get_renderable=display.picture, console=console, refresh_per_second=8):
        yield display


class Status:
    """A reporter that keeps the newest numbers of a run, and gives them as text."""

    def __init__(self, run: Training) -> None:
        self.total = run.config.steps or 0
        self.step = run.step
        self.skipped = run.step - run.num_steps
        self._unit = run.recipe.unit
        self._row: Row = {}
        self._speed = 0.0
        self._validation: Row = {}

    def rows(self, rows: Sequence[Row], speed: float) -> None:
        """Take over newer rows."""
        self.step, self._row, self._speed = rows[-1]["step"], rows[-1], speed
        self.skipped += sum(row["skipped"] > 0 for row in rows)

    def validated(self, row: Row) -> None:
        """Take over the row of a newer validation."""
        self._validation = row

    def training(self) -> list[tuple[str, str]]:
        """Loss, accuracy, gradient norm and learning rate, as pairs of name and value in display order."""
        row = self._row
        if not row:
            return []
        norm = [("grad norm", f"{row['grad_norm']:.3g}")] if "grad_norm" in row else []
        return [
            ("loss", f"{row['loss']:.4f}"),
            ("accuracy", f"{row['accuracy']:.1%}"),
            *norm,
            ("lr", f"{row['lr']:.2g}"),
        ]

    def machine(self) -> list[tuple[str, str]]:
        """Loss scale, skipped steps and speed, as pairs of name and value."""
        if not self._row:
            return []
        return [
            ("scale", f"{self._row['loss_scale']:g}"),
            ("skipped", str(self.skipped)),
            (f"{self._unit}/s", short(self._speed)),
        ]

    def validation(self) -> list[tuple[str, str]]:
        """The last validation, as pairs of name and value."""
        if not self._validation:
            return []
        row = self._validation
        return [
            ("step", str(row["step"])),
            ("loss", f"{row['validation_loss']:.4f}"),
            ("accuracy", f"{row['validation_accuracy']:.2%}"),
        ]


class PlainLines(Status):
    """Prints about ``LINES`` lines per run, for files and pipes."""

    def __init__(self, console: Console, run: Training) -> None:
        super().__init__(run)
        self._console = console
        self._every = max(1, self.total // LINES)
        self._first = self.step + 1

    def rows(self, rows: Sequence[Row], speed: float) -> None:
        """Print the rows that are due: the first, every ``total // LINES``-th and the last."""
        for row in rows:
            super().rows([row], speed)
            if self.step in (self._first, self.total) or self.step % self._every == 0:
                head = f"step {self.step:>{len(str(self.total))}}/{self.total}"
                self._print(head, [*self.training(), *self.machine()])

    def validated(self, row: Row) -> None:
        """Print a validation."""
        super().validated(row)
        self._print("validation", self.validation())

    def _print(self, head: str, parts: Sequence[tuple[str, str]]) -> None:
        # Pad values to columns, so that a log is easy to scan.
        text = "  ".join(f"{name} {value:>8}" for name, value in parts)
        self._console.print(f"{head}  {text}", soft_wrap=True, highlight=False, markup=False)


class LiveDisplay(Status):
    """Draws a progress bar and the newest numbers."""

    def __init__(self, console: Console, run: Training) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(run)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("steps,"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            expand=True,
        )
        name = f"{run.config.recipe} {run.config.level}"
        self._task = self._bar.add_task(name, total=self.total, completed=self.step)

    def rows(self, rows: Sequence[Row], speed: float) -> None:
        """Take over newer rows, and move the bar."""
        super().rows(rows, speed)
        self._bar.update(self._task, completed=self.step)

    def picture(self) -> Any:
        """What to draw now."""
        from rich.console import Group

        # Short lines: a wrapped line makes the display jump, and the terminal echoes ^C at the end of the last line.
        lines = [
            ("training", self.training() or [("the first steps are under way", "")]),
            ("precision", self.machine()),
            ("validation", self.validation()),
        ]
        return Group(self._bar, *(_styled(head, parts) for head, parts in lines if parts))


def _styled(head: str, parts: Sequence[tuple[str, str]]) -> Any:
    from rich.text import Text

    text = Text(f"{head:<11}", style="dim")
    for name, value in parts:
        alarming = name == "skipped" and value != "0"
        text.append(f"{name} ", style="dim").append(
            f"{value}   ", style="bold yellow" if alarming else "bold not dim"
        )
    return text
