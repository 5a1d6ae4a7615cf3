"""Times variants interleaved, prints ratios, and saves a CSV with device, versions and date beside the figures."""

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
"""The least seconds of one timing. A shorter variant is repeated within the timing."""

AHEAD = 4
"""The least repetitions of one timing on an accelerator, where the host launches a step while the device takes the last."""

Variant = Callable[[], object]
"""One repetition of the work to be timed, with all preparation done."""


class Sample(NamedTuple):
    """One timing, in seconds per repetition.

    Attributes:
        cpu: processor time of all threads of the process.
        wall: wall-clock time, which ends with a synchronisation on an accelerator.
    """

    cpu: float
    wall: float


def arguments(description: str | None, *, rounds: int = 11) -> argparse.Namespace:
    """Parse the options that every benchmark has."""
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
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round of the first case, to try a script, also one for a GPU on a CPU",
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.save = 1, False
    torch.set_num_threads(options.threads)
    return options


def time_variants(variants: Mapping[str, Variant], *, device: str, rounds: int) -> dict[str, list[Sample]]:
    """Processor time and wall clock per repetition, by variant.

    The variants take turns in every round, in alternating order, so that other load on the machine affects all alike.
    Garbage is collected before the first round and not later. Each variant has its own thread, because an engine also
    handles gradients of other engines that its thread trains, and a training job has one engine.
    """
    if device == "cpu":
        _train_as_in_main_thread()
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    with ExitStack() as stack:
        # The number of OpenMP threads is a setting of each calling thread.
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
    """Print medians, quartiles and ratios to ``baseline``; with ``--save``, save them.

    On the CPU, processor times are compared, because other load on a shared machine changes them little; elsewhere the
    wall clock. A ratio is the median of the ratios within each round.

    Args:
        more: further columns, each with a value per variant.
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
    """With ``--save``, write rows to the CSV of a question, in place of this device's rows of the same cases."""
    if not options.save:
        return
    path = RESULTS / f"{question}.csv"
    path.parent.mkdir(exist_ok=True)
    facts = _facts(options)
    new = [{**row, **facts} for row in rows]
    cases = {row["case"] for row in rows}
    # Without --only, a run's first report deletes this device's older rows, because cases may have been renamed since.
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
    """The rows of a CSV; an empty list if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def chosen(cases: Iterable[str], options: argparse.Namespace) -> list[str]:
    """The cases that ``--only`` selects; with ``--quick`` the first of them."""
    selected = [case for case in cases if options.only in case]
    return selected[:1] if options.quick else selected


def describe(options: argparse.Namespace) -> str:
    """The device in words."""
    if options.device.startswith("cuda"):
        return torch.cuda.get_device_name(options.device)
    threads = "1 thread" if options.threads == 1 else f"{options.threads} threads"
    return f"{_processor()}, {threads}" if options.device == "cpu" else options.device


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


_begun: set[str] = set()


def _train_as_in_main_thread() -> None:
    """Let all threads allocate from the main thread's pool and, with ``--threads 1``, pin the process to one core.

    glibc's pools of other threads return memory to the system more readily: a step that allocates much was 40 % slower
    there than in the main thread, where jobs train. One core, because cores shared with others differ in speed.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MAX_POOLS, 1)
    if torch.get_num_threads() == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


_MAX_POOLS = -8
"""``M_ARENA_MAX`` of glibc's ``malloc.h``."""


def _repeats(run: Variant, device: str) -> int:
    """The repetitions per timing of a variant, counted after two runs in which the variant compiles its kernels."""
    for _ in range(2):
        run()
    once = _time(run, 1, device).wall
    return max(1 if device == "cpu" else AHEAD, min(1000, int(ENOUGH / max(once, 1e-9))))


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
    """The model of the CPU, and the widest vector instructions that torch uses on it."""
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
