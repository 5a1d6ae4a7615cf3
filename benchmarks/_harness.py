"""Interleaved timing of variants, and a CSV with device, versions and date beside the figures."""

from __future__ import annotations

import argparse
import csv
import ctypes
import datetime
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

import halfpeak

RESULTS = Path(__file__).parent / "results"

ENOUGH = 0.01
"""Seconds that one timing lasts at least: what is shorter is repeated within it."""

Variant = Callable[[], object]
"""One repetition of the work to be timed; it prepares nothing."""


class Sample(NamedTuple):
    """One timing, per repetition.

    Attributes:
        cpu: seconds of processor time, of all threads of the process.
        wall: seconds on the wall clock, with a synchronisation on an accelerator.
    """

    cpu: float
    wall: float


def arguments(description: str | None, *, rounds: int = 11) -> argparse.Namespace:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"interleaved rounds (default: {rounds})")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: 1)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--save", action="store_true", help="replace this device's rows of these cases in benchmarks/results/"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def time_variants(variants: Mapping[str, Variant], *, device: str, rounds: int) -> dict[str, list[Sample]]:
    """Processor time and wall clock per repetition, by variant.

    Variants take turns within each round, forwards and backwards, so that whatever else the machine does falls on all of
    them alike. Garbage is collected before and not in between. Each has a thread of its own: an engine also looks after the
    gradients of other engines that its thread trains, and a training job has no other.
    """
    _train_as_in_main_thread()
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    with ExitStack() as stack:
        # How many threads OpenMP takes is asked of the thread that asks for them.
        threads = {
            name: stack.enter_context(
                ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))
            )
            for name in variants
        }
        repeats = {
            name: threads[name].submit(_repeats, run, device).result() for name, run in variants.items()
        }
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        for number in range(rounds):
            for name in list(variants) if number % 2 == 0 else list(variants)[::-1]:
                timing = threads[name].submit(_time, variants[name], repeats[name], device)
                samples[name].append(timing.result())
    return samples


def report(
    question: str,
    case: str,
    samples: Mapping[str, Sequence[Sample]],
    *,
    baseline: str,
    options: argparse.Namespace,
    **more: Mapping[str, object],
) -> None:
    """Print medians, quartiles and ratios to ``baseline``, and save them if asked.

    What is compared is processor time on the CPU, which neighbours on a shared machine move little, and the wall clock
    elsewhere. A ratio is the median of the ratios within a round.

    Args:
        more: further columns: the value of each for a variant.
    """
    clock = "cpu" if options.device == "cpu" else "wall"
    print(f"\n{question}: {case} on {describe(options)}, {options.rounds} rounds, {clock} clock")
    base = [getattr(sample, clock) for sample in samples[baseline]]
    rows: list[dict[str, object]] = []
    for name, taken in samples.items():
        times = [getattr(sample, clock) for sample in taken]
        low, middle, high = quartiles(times)
        ratio_low, ratio, ratio_high = quartiles(
            [mine / other for mine, other in zip(times, base, strict=True)]
        )
        row: dict[str, object] = {
            "case": case,
            "variant": name,
            "ms": round(middle * 1e3, 4),
            "q1_ms": round(low * 1e3, 4),
            "q3_ms": round(high * 1e3, 4),
            "min_ms": round(min(times) * 1e3, 4),
            "wall_ms": round(statistics.median(sample.wall for sample in taken) * 1e3, 4),
            "ratio": round(ratio, 3),
            "ratio_q1": round(ratio_low, 3),
            "ratio_q3": round(ratio_high, 3),
            "clock": clock,
            **{column: values.get(name, "") for column, values in more.items()},
        }
        print(
            f"  {name:52}{row['ms']:>10} ms  ({row['q1_ms']} to {row['q3_ms']}, wall {row['wall_ms']})"
            f"  {ratio:.3f}x  ({ratio_low:.3f} to {ratio_high:.3f})",
            flush=True,
        )
        rows.append(row)
    save(question, rows, options)


def save(question: str, rows: Sequence[Mapping[str, object]], options: argparse.Namespace) -> None:
    """Where ``--save`` was given, put rows into the CSV of a question, in place of this device's rows of the same case."""
    if not options.save:
        return
    path = RESULTS / f"{question}.csv"
    path.parent.mkdir(exist_ok=True)
    facts = _facts(options)
    new = [{**row, **facts} for row in rows]
    cases = {row["case"] for row in rows}
    # A first report of this run leaves nothing of an earlier one, whose cases may have had other names.
    fresh = question not in _begun and not options.only
    _begun.add(question)
    old = [
        row
        for row in read(path)
        if list(row) == list(new[0])
        and (row["device"] != facts["device"] or not (fresh or row["case"] in cases))
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(new[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(old)
        writer.writerows(new)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def chosen(cases: Iterable[str], options: argparse.Namespace) -> list[str]:
    """The cases that ``--only`` leaves."""
    return [case for case in cases if options.only in case]


def describe(options: argparse.Namespace) -> str:
    """A device in words."""
    if options.device.startswith("cuda"):
        return torch.cuda.get_device_name(options.device)
    threads = "1 thread" if options.threads == 1 else f"{options.threads} threads"
    return f"{_processor()}, {threads}" if options.device == "cpu" else options.device


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """A quarter of the values is below the first, half below the second, a quarter above the third."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


_begun: set[str] = set()


def _train_as_in_main_thread() -> None:
    """Threads beside the main one take memory where it does, and those that need one core share one.

    glibc gives each thread a pool of its own, which goes back to the system more readily: a training step that allocates much
    was 40 % slower there than in the main thread, where jobs train. And cores that others use, too, differ in speed.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MAX_POOLS, 1)
    if torch.get_num_threads() == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


_MAX_POOLS = -8
"""``M_ARENA_MAX`` of glibc's ``malloc.h``."""


def _repeats(run: Variant, device: str) -> int:
    """How often a timing repeats a variant, which has run often enough now to have compiled what it compiles."""
    for _ in range(2):
        run()
    once = _time(run, 1, device).wall
    return max(1, min(1000, int(ENOUGH / max(once, 1e-9))))


def _time(run: Variant, repeats: int, device: str) -> Sample:
    is_cpu = device == "cpu"
    if not is_cpu:
        torch.accelerator.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        run()
    if not is_cpu:
        torch.accelerator.synchronize()
    return Sample((time.process_time() - cpu) / repeats, (time.perf_counter() - wall) / repeats)


def _processor() -> str:
    """The model of the CPU, and the widest vectors that torch uses on it."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _facts(options: argparse.Namespace) -> dict[str, object]:
    return {
        "device": describe(options),
        "rounds": options.rounds,
        "torch": torch.__version__,
        "halfpeak": halfpeak.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
