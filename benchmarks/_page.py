"""Makes the tables of docs/benchmarks.md from the CSV files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

from _harness import RESULTS, read

Rows: TypeAlias = list[dict[str, Any]]
Results: TypeAlias = Mapping[str, Rows]

QUESTIONS = ("step", "memory", "training", "accumulation", "casting", "compile")
ON_GPU = ("gpu_training", "gpu_step", "gpu_forms", "gpu_host", "gpu_memory")
AMP, HAND = "native AMP", "by hand, AdamW(fused=True)"
FUSED, PER_OP, LOW = (
    "halfpeak O2, FusedAdamW, compiled backend",
    "halfpeak per operation, torch's lists",
    "halfpeak O2",
)


LISTS, AUTOCAST = "halfpeak, torch's lists", "torch.autocast"


class Goal(NamedTuple):
    """A goal: at most ``limit`` times the baseline's time.

    Attributes:
        text: the goal in words.
        question: the CSV.
        case: the start of the case's name.
        variant: the measured variant.
        baseline: the variant to compare with.
        limit: the ratio.
    """

    text: str
    question: str
    case: str
    variant: str
    baseline: str
    limit: float


GOALS = (
    Goal("O2 step, transformer of 23 M parameters", "step", "a transformer", FUSED, HAND, 0.60),
    Goal("O2 step, 400 tensors, 26 M parameters", "step", "400 tensors, 26 M", FUSED, HAND, 0.60),
    Goal("O2 step, 400 tensors of 1024", "step", "400 tensors of 1024", FUSED, HAND, 0.16),
    *(
        Goal(f"{case}, {level}", "training", case, variant, AMP, 1.02)
        for case in ("GPT", "MLP", "CNN")
        for level, variant in (("O2", LOW), ("per operation", PER_OP))
    ),
    Goal("bound by overhead, O2", "training", "40 layers", LOW, AMP, 0.80),
    Goal("bound by overhead, per operation", "training", "40 layers", PER_OP, AMP, 1.02),
    *(
        Goal(
            f"1,000 calls of {name}, torch's lists", "casting", f"1000 calls of {name}", LISTS, AUTOCAST, 1.1
        )
        for name in ("relu", "softmax", "linear")
    ),
)
BYTES = {
    "halfpeak O2, FusedAdamW": 16.0,
    "halfpeak O2, FusedAdamW, remainders": 14.0,
    "halfpeak O2, FusedAdamW, 8-bit remainders and moments": 7.2,
}
"""The most bytes per parameter, by variant."""

SECONDS = 5.0
"""The most seconds in which the first step may compile its kernels."""


def load() -> dict[str, Rows]:
    """The rows of each question, of the CPU that was measured last."""
    found: dict[str, Rows] = {}
    for question in QUESTIONS:
        rows = [row for row in read(RESULTS / f"{question}.csv") if "thread" in row["device"]]
        if rows:
            device = max(rows, key=lambda row: row["date"])["device"]
            found[question] = [row for row in rows if row["device"] == device]
    return found


def load_gpu() -> dict[str, Rows]:
    """The rows of each question that a GPU was measured for, of the GPU that was measured last."""
    found: dict[str, Rows] = {}
    for question in ON_GPU:
        rows = read(RESULTS / f"{question}.csv")
        if rows:
            device = max(rows, key=lambda row: row["date"])["device"]
            found[question] = [row for row in rows if row["device"] == device]
    return found


def load_quality() -> Rows:
    """The losses of the machine that trained last."""
    rows = read(RESULTS / "quality.csv")
    return [row for row in rows if row["device"] == max(rows, key=lambda row: row["date"])["device"]]


def load_peers() -> Results:
    """The rows of ``peers.py`` by what was measured, of the machine that measured last."""
    found: dict[str, Rows] = {}
    for what in ("bytes", "time", "loss"):
        rows = read(RESULTS / f"peers_{what}.csv")
        found[what] = [
            row for row in rows if row["device"] == max(rows, key=lambda row: row["date"])["device"]
        ]
    return found


def fill(page: str, results: Results) -> str:
    """The page with its tables replaced by those of ``results``."""
    tables = {
        "machine": machine(results),
        "goals": goals(results),
        **{name: ratios(rows) for name, rows in results.items() if name not in ("compile", "memory")},
        "memory": held(results.get("memory", [])),
        "compile": seconds(results.get("compile", [])),
        **gpu_tables(load_gpu()),
        "quality": quality(load_quality()),
        "peers": peers(load_peers()),
    }

    def replaced(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{tables.get(match[2]) or 'Not yet measured.'}\n\n{match[3]}"

    return re.sub(r"(<!-- begin (\w+) -->)\n.*?(<!-- end -->)", replaced, page, flags=re.DOTALL)


def gpu_tables(found: Results) -> dict[str, str]:
    """The tables of the GPU's part of the page, by name."""
    large = [
        row for row in found.get("gpu_step", []) if "tensors" in row["case"] and float(row["of_copy"]) > 0.1
    ]
    steps = [row for row in large if row["case"] == large[-1]["case"]]
    forms = [row for row in found.get("gpu_forms", []) if row["of_copy"]]
    hosts, memory = found.get("gpu_host", []), found.get("gpu_memory", [])
    return {
        "gpu_machine": machine(found),
        "gpu_training": ratios(found.get("gpu_training", [])),
        "gpu_step": shares(steps),
        "gpu_forms": shares(forms),
        "gpu_host": table(
            ["", "ms until the host is free", "kernels", "waits"],
            [[row["variant"], f"{float(row['ms']):.1f}", row["kernels"], row["waits"]] for row in hosts],
        ),
        "gpu_memory": table(
            ["", "bytes held", "at the peak of a step"],
            [[row["variant"], f"{float(row['held']):.2f}", f"{float(row['peak']):.2f}"] for row in memory],
        ),
    }


def shares(rows: Rows) -> str:
    """The table of one run: ratios to its baseline, and the share of a copy's bandwidth."""
    return table(
        ["", "time", "of a copy's bandwidth"],
        [[row["variant"], _cell(row), f"{float(row['of_copy']):.0%}"] for row in rows],
    )


def by_seed(rows: Rows) -> dict[str, dict[str, list[float]]]:
    """The losses over the steps, by variant and by seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: int(row["step"])):
        found.setdefault(row["variant"], {}).setdefault(row["seed"], []).append(float(row["loss"]))
    return {name: found[name] for name in dict.fromkeys(row["variant"] for row in rows)}


def quality(rows: Rows) -> str:
    """The table of losses in the last quarter of the steps, and what each variant has more than the first, seed by seed."""
    lines: list[list[str]] = []
    base: dict[str, float] = {}
    for name, curves in by_seed(rows).items():
        last = {seed: fmean(losses[-(len(losses) // 4) :]) for seed, losses in curves.items()}
        base = base or last
        more = [loss - base[seed] for seed, loss in last.items()]
        spread = f" ({min(more):+.4f} to {max(more):+.4f})" if len(more) > 1 else ""
        gap = f"{fmean(more):+.4f}{spread}" if lines else ""
        lines.append([name, f"{fmean(last.values()):.4f}", gap, ", ".join(sorted(last))])
    facts = [
        f"{row['device']}, torch {row['torch']}, Python {row['python']}, {row['date']}." for row in rows[:1]
    ]
    return "\n\n".join([table(["", "loss", "more than the first row", "seeds"], lines), *facts])


def peers(found: Results) -> str:
    """The table of small forms beside those of other libraries: bytes, time, and losses less those of the first row."""
    bytes_held = {row["variant"]: float(row["bytes"]) for row in found["bytes"]}
    times = {row["variant"]: row for row in found["time"]}
    losses: dict[str, dict[str, float]] = {}
    for row in found["loss"]:
        losses.setdefault(row["variant"], {})[row["seed"]] = float(row["loss"])
    base = next(iter(losses.values()))
    lines: list[list[str]] = []
    for name, each in losses.items():
        more = [loss - base[seed] for seed, loss in each.items()]
        gap = f"{min(more):+.4f} to {max(more):+.4f}" if lines else ""
        lines.append(
            [name, f"{bytes_held[name]:.2f}", _cell(times[name]), f"{fmean(each.values()):.4f}", gap]
        )
    titles = ["", "bytes a parameter", "a step", "loss", "more than the first row"]
    return f"{table(titles, lines)}\n\n{machine(found)}"


def machine(results: Results) -> str:
    """The line of device, versions, date and rounds."""
    rows = [row for rows in results.values() for row in rows]
    if not rows:
        return ""
    device, torch, python, date = (
        ", ".join(sorted({row[name] for row in rows})) for name in ("device", "torch", "python", "date")
    )
    least = min(int(row["rounds"]) for row in rows if "bytes" not in row)  # bytes are counted once
    return f"{device}; torch {torch}, Python {python}; {date}; {least} or more interleaved rounds."


def goals(results: Results) -> str:
    """The table of goals and what was measured."""
    lines = [line for goal in GOALS if (line := _goal_line(goal, results))]
    for row in results.get("memory", []):
        if row["variant"] in BYTES:
            limit, measured = BYTES[row["variant"]], float(row["bytes"])
            reached = "yes" if round(measured, 1) <= limit else "no"
            lines.append([row["variant"], f"{limit} bytes a parameter", f"{measured:.2f}", reached])
    for row in results.get("compile", []):
        if row["variant"] == "FusedAdamW, nothing on disk":
            whole = float(row["s"]) + float(row["start_s"])
            reached = "yes" if float(row["s"]) <= SECONDS else "no"
            lines.append(
                [
                    f"cold compile of the step, {row['case']}",
                    f"{SECONDS:g} s",
                    f"{row['s']} s, {whole:.1f} s with the compiler's start",
                    reached,
                ]
            )
    return table(["what", "goal", "measured", "reached"], lines)


def _goal_line(goal: Goal, results: Results) -> list[str] | None:
    rows = [row for row in results.get(goal.question, []) if row["case"].startswith(goal.case)]
    ratio = next((float(row["ratio"]) for row in rows if row["variant"] == goal.variant), None)
    if ratio is None or goal.baseline not in [row["variant"] for row in rows if row["ratio"] == "1.0"]:
        return None
    wanted = f"{goal.limit:.2f}x of {goal.baseline}"
    return [goal.text, wanted, f"{ratio:.2f}x", "yes" if ratio <= goal.limit else "no"]


def ratios(rows: Rows) -> str:
    """Tables with a row for each variant and a column for each case; cases with the same baseline share a table."""
    parts: list[str] = []
    for cases in _shared(rows):
        chosen = [row for row in rows if row["case"] in cases]
        variants = list(dict.fromkeys(row["variant"] for row in chosen))
        cells = {(row["variant"], row["case"]): row for row in chosen}
        lines = [
            [name, *(_cell(cells[name, case]) if (name, case) in cells else "" for case in cases)]
            for name in variants
        ]
        parts.append(table(["", *cases], lines))
    return "\n\n".join(parts)


def _shared(rows: Rows) -> list[list[str]]:
    """The cases, grouped by baseline."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["ratio"] == "1.0":
            cases = found.setdefault(row["variant"], [])
            if row["case"] not in cases and not any(row["case"] in known for known in found.values()):
                cases.append(row["case"])
    return [cases for cases in found.values() if cases]


def _cell(row: Mapping[str, str]) -> str:
    ms = float(row["ms"])
    digits = 2 if ms < 10 else 1 if ms < 100 else 0
    return f"**{float(row['ratio']):.2f}x** {ms:.{digits}f} ms"


def held(rows: Rows) -> str:
    """The table of bytes."""
    return table(
        ["", "bytes a parameter"], [[row["variant"], f"**{float(row['bytes']):.2f}**"] for row in rows]
    )


def seconds(rows: Rows) -> str:
    """The table of compile times."""
    if not rows:
        return ""
    titles = [
        "",
        "first step",
        "of it processor time",
        "start of the compiler before it",
        "kernels",
        "made later",
    ]
    lines = [
        [
            f"{row['case']}: {row['variant']}",
            f"**{row['s']} s** ({row['min_s']} to {row['max_s']})",
            f"{row['cpu_s']} s",
            f"{row['start_s']} s",
            row["kernels"],
            row["later"],
        ]
        for row in rows
    ]
    return table(titles, lines)


def table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; an empty string without lines."""
    if not lines:
        return ""
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, ["---"] * len(titles), *lines))
