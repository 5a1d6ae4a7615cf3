"""Interleaved timing of variants, and a CSV with device, versions and date beside the figures."""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import halfpeak

RESULTS = Path(__file__).parent / "results"

Variant = Callable[[], None]
"""One repetition of the work to be timed; it prepares nothing."""


def arguments(description: str | None) -> argparse.Namespace:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument(
        "--rounds", type=int, default=15, help="interleaved rounds; at least 9 for a figure to report"
    )
    parser.add_argument("--save", action="store_true", help="add the rows to benchmarks/results/")
    return parser.parse_args()


def time_variants(variants: Mapping[str, Variant], *, device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds per repetition, by variant. One thread's CPU time on a CPU, wall clock with a synchronisation elsewhere.

    Variants take turns within each round, so that whatever else the machine does falls on all of them alike.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for _ in range(rounds):
        for name, run in variants.items():
            times[name].append(_time_once(run, device))
    return times


def report(
    question: str, case: str, times: Mapping[str, list[float]], *, baseline: str, options: argparse.Namespace
) -> None:
    """Print a table of medians, spread and ratios to ``baseline``, and add it to the CSV if asked."""
    base = statistics.median(times[baseline])
    print(f"\n{question}: {case} on {describe(options.device)}, {options.rounds} rounds")
    rows: list[dict[str, object]] = []
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        row = {
            "case": case,
            "variant": name,
            "median_ms": round(middle * 1e3, 4),
            "min_ms": round(min(seconds) * 1e3, 4),
            "max_ms": round(max(seconds) * 1e3, 4),
            "ratio": round(middle / base, 3),
        }
        print(
            f"  {name:42} {row['median_ms']:>10} ms  ({row['min_ms']} to {row['max_ms']})  {row['ratio']:.2f}x"
        )
        rows.append({**row, **_facts(options)})
    if options.save:
        _append(RESULTS / f"{question.replace(' ', '_')}.csv", rows)


def describe(device: str) -> str:
    """The name of a device."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{device} ({platform.machine()}, one thread)"


def _time_once(run: Variant, device: str) -> float:
    if device == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.accelerator.synchronize()
    start = time.perf_counter()
    run()
    torch.accelerator.synchronize()
    return time.perf_counter() - start


def _facts(options: argparse.Namespace) -> dict[str, object]:
    return {
        "device": describe(options.device),
        "rounds": options.rounds,
        "torch": torch.__version__,
        "halfpeak": halfpeak.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def _append(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
    print(f"  saved to {path.relative_to(RESULTS.parent.parent)}")
