"""The results of a run: printed as a table, and written as JSON and as a plot."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from halfpeak import __version__
from halfpeak.checkpoint.temporary import write_text
from halfpeak.cli.run_folder import RunFolder
from halfpeak.cli.text import facts_table, short
from halfpeak.core.extras import MissingExtraError, needs_extra
from halfpeak.engine.memory_report import peak_memory
from halfpeak.insight.history import Row, read_rows
from halfpeak.insight.plots import save_history
from halfpeak.recipes.training import Training

if TYPE_CHECKING:
    from rich.console import Console


def summarise(training: Training, rows: list[Row], reason: str | None) -> dict[str, Any]:
    """The results of a run so far, as plain values."""
    steps = [row for row in rows if "loss" in row]
    validations = [row for row in rows if "validation_accuracy" in row]
    config, device = training.config, training.device
    done = training.step * config.batch * config.accumulate * training.recipe.units
    return {
        "recipe": config.recipe,
        "level": config.level,
        "level_reason": reason,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"halfpeak": __version__, "python": platform.python_version()},
        "environment": training.environment(),
        "parameters": training.parameters,
        "steps": training.step,
        "steps_of": config.steps,
        "skipped": training.step - training.num_steps,
        "loss": steps[-1]["loss"] if steps else None,
        "loss_scale": steps[-1].get("loss_scale") if steps else None,
        "validation_loss": validations[-1].get("validation_loss") if validations else None,
        "validation_accuracy": validations[-1]["validation_accuracy"] if validations else None,
        "best_validation_accuracy": max(
            (row["validation_accuracy"] or 0.0 for row in validations), default=None
        ),
        "seconds": round(training.seconds, 3),
        "speed": round(done / training.seconds, 1) if training.seconds else None,
        "speed_unit": f"{training.recipe.unit}/s",
        "peak_memory_bytes": peak_memory(device),
    }


def finish(training: Training, folder: RunFolder, console: Console, reason: str | None) -> None:
    """Write the summary and the plot, and print the table."""
    rows = read_rows(folder.metrics)
    results = summarise(training, rows, reason)
    write_text(folder.summary, json.dumps(results, indent=2) + "\n")
    config = training.config
    if config.plot:
        title = f"{results['recipe']} at {results['level']}: {training.num_steps} steps taken, {results['skipped']} skipped"
        try:
            save_history(rows, folder.picture, title=title, clips=bool(config.clip_norm or config.clip_value))
        except MissingExtraError as error:
            console.print(f"no picture: {error}", highlight=False, markup=False, soft_wrap=True)
    console.print(_table(results, folder))


def _table(results: dict[str, Any], folder: RunFolder) -> Any:
    with needs_extra():
        from rich.text import Text
    table = facts_table(f"{results['recipe']} at {results['level']}")
    num_steps = results["steps"] - results["skipped"]
    table.add_row("device", results["environment"]["device"])
    table.add_row("parameters", f"{results['parameters']:,}")
    table.add_row("steps", f"{num_steps} taken, {results['skipped']} skipped")
    if results["loss"] is not None:
        table.add_row("training loss", f"{results['loss']:.4f}")
    if results["validation_loss"] is not None:
        table.add_row("validation loss", f"{results['validation_loss']:.4f}")
    if results["validation_accuracy"] is not None:
        best = f"{results['validation_accuracy']:.2%} (best {results['best_validation_accuracy']:.2%})"
        table.add_row("validation accuracy", best)
    if results["loss_scale"] is not None:
        table.add_row("loss scale", f"{results['loss_scale']:g}")
    if results["speed"] is not None:
        table.add_row(
            "speed", f"{short(results['speed'])} {results['speed_unit']}, {results['seconds']:.1f} s in steps"
        )
    if results["peak_memory_bytes"]:
        table.add_row("peak memory", f"{results['peak_memory_bytes'] / 2**30:.2f} GiB")
    files = sorted(path.name for path in folder.path.iterdir() if not path.name.endswith(".previous"))
    # Text, because rich would interpret markup in the name of a folder.
    table.add_row("results", Text(f"{folder.path}/\n" + "  ".join(files)))
    return table
