"""Starting ranks: a process that imports torch once and forks them, and what each of them saw."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: here once, rather than in every rank
import torch.distributed as dist

from laws.source import ROOT

Seen = dict[str, list[Any]]
"""By scenario, what each rank saw."""


def launch(script: str, ranks: int, folder: Path) -> Seen:
    """Run a script, whose path begins in this folder, and whose ranks each leave ``rank<number>.pt`` in ``folder``."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script), str(ranks), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    files = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]
    return {name: [one[name] for one in files] for name in files[0]}


def fork_ranks(see: Callable[[int, int, Path], dict[str, Any]]) -> int:
    """Fork the ranks that the command line asks for: each joins a group of gloo and saves what it sees.

    Returns:
        How many of them failed.
    """
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    forking = multiprocessing.get_context("fork")
    processes = [forking.Process(target=_join, args=(see, rank, ranks, folder)) for rank in range(ranks)]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running)):
            ended = running.pop(sentinel)  # type: ignore[call-overload]
            ended.join()
            for other in running.values() if ended.exitcode else ():
                other.kill()  # it would wait for ever
    return sum(process.exitcode != 0 for process in processes)


def _join(see: Callable[[int, int, Path], dict[str, Any]], rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    torch.save(see(rank, ranks, folder), folder / f"rank{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()
