"""The long runs: ``make fuzz ARGS="--seed 7 --minutes 10"``."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
import warnings
from multiprocessing.queues import Queue
from typing import Any

import torch

from fuzz.compare import Counts, Mismatch, compare
from fuzz.config import draw
from fuzz.events import EVENTS, MOMENTS
from fuzz.shrink import script, shrink

MAX_SHOWN = 5


def main() -> int:
    """Run until the time is over; return 1 if a mismatch was found."""
    arguments = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    arguments.add_argument("--seed", type=int, default=0, help="where the configurations begin")
    arguments.add_argument("--minutes", type=float, default=1.0, help="how long")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = arguments.parse_args()
    start, forking = time.monotonic(), multiprocessing.get_context("fork")
    found: Queue[Any] = forking.Queue()
    jobs = [
        forking.Process(target=work, args=(given.seed, job, given.jobs, start + 60 * given.minutes, found))
        for job in range(given.jobs)
    ]
    for job in jobs:
        job.start()
    counts, failures = Counts(), list[tuple[int, str, str]]()
    for _ in jobs:
        some, more = found.get()
        counts.add(some)
        failures += more
    for job in jobs:
        job.join()
    report(counts, failures, (time.monotonic() - start) / 60)
    return bool(failures)


def work(seed: int, job: int, jobs: int, until: float, found: Queue[Any]) -> None:
    """Try every ``jobs``-th configuration."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    gc.freeze()  # a fifth faster: every collection would go through all that was imported
    counts, failures, number = Counts(), list[tuple[int, str, str]](), seed * 10_000_000 + job
    while time.monotonic() < until:
        config = draw(number, MOMENTS)
        try:
            compare(config, counts)
        except Mismatch as error:
            failures.append((number, str(error), script(shrink(config)) if len(failures) < MAX_SHOWN else ""))
        number += jobs
    found.put((counts, failures))


def report(counts: Counts, failures: list[tuple[int, str, str]], minutes: float) -> None:
    """Print what was tried, by event, and the mismatches."""
    for name in EVENTS:
        refused = sum(count for key, count in counts.refused.items() if key.startswith(f"{name}: "))
        left_out = counts.left_out[name]
        print(
            f"{counts.events[name]:8d}  {name}"
            + (f", refused {refused}" * bool(refused))
            + (f", left out {left_out}" * bool(left_out))
        )
    for title, table in (
        ("refused", counts.refused),
        ("compared with a tolerance", counts.tolerated),
        ("left out", counts.known),
    ):
        print(f"\n{title}:")
        for reason, count in table.most_common():
            print(f"{count:8d}  {reason}")
    total = counts.configurations + len(failures)
    print(
        f"\n{total} configurations ({total / minutes:.0f} per minute), {counts.steps} steps, {counts.skips} of them "
        f"skipped, {counts.collapses} with LossScaleCollapse, {sum(counts.events.values())} events of {len(EVENTS)} kinds: "
        f"{len(failures)} mismatches"
    )
    for number, error, text in failures:
        print(f"\n== configuration {number}: {error}\n{text}")


if __name__ == "__main__":
    sys.exit(main())
