"""Starts ranks as forks of one process, and collects the results of each rank.

That process is itself forked from a server that has imported torch: see ``support/forks.py``.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it: here once, rather than in every rank
import torch.distributed as dist

from halfpeak import HalfpeakError
from support.forks import be_python, python

Seen = dict[str, list[Any]]
"""The result of each rank, by scenario."""


class Refusals(dict[str, list[str]]):
    """A decorator that calls a function at once; it keeps the error, by the function's name, and its expected beginning."""

    def __call__(self, expected: str) -> Callable[[Callable[[], object]], None]:
        def call(function: Callable[[], object]) -> None:
            try:
                function()
                said = "nothing"
            except (HalfpeakError, KeyError) as error:
                said = f"{type(error).__name__}: {error}"
            self[function.__name__] = [said, expected]

        return call


def check_refusals(seen: list[dict[str, list[str]]], count: int) -> None:
    """Every rank has refused ``count`` calls with the errors that were expected."""
    for of_rank in seen:
        assert len(of_rank) == count
        wrong = {name: said for name, (said, expected) in of_rank.items() if not said.startswith(expected)}
        assert not wrong, wrong


def launched(module: str, ranks: int = 2) -> Any:
    """A fixture: what :func:`launch` returns, once for each file of tests."""

    @pytest.fixture(scope="module")
    def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
        return launch(module, ranks, tmp_path_factory.mktemp("ranks"))

    return seen


def launch(module: str, ranks: int, folder: Path) -> Seen:
    """Run ``see(rank, ranks, folder)`` of a module on each rank, in one process group; return the results."""
    program = f"import {module} as found, distributed.launching as each; raise SystemExit(each.fork_ranks(found.see))"
    _run_python("-c", program, str(ranks), str(folder))
    return results(folder, ranks)


def results(folder: Path, ranks: int) -> Seen:
    """What the ranks have saved in a folder."""
    files = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]
    return {name: [one[name] for one in files] for name in files[0]}


def run_as_torchrun(*commands: list[str], imported: Sequence[str] = ()) -> list[str]:
    """Run each command on two ranks with torchrun's environment variables; return what each command printed.

    Args:
        commands: run one after another; each is a script, or ``-m`` and a module, and its arguments.
        imported: modules that take seconds to import, which the process imports before it forks the ranks.
    """
    return _run_python(__file__, json.dumps(imported), *map(json.dumps, commands)).split("\f")[:-1]


def _run_python(*arguments: str) -> str:
    done = python(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fork_ranks(see: Callable[[int, int, Path], dict[str, Any]]) -> int:
    """Fork the number of ranks that the command line gives: each joins a gloo group and saves its results.

    Returns:
        How many of them failed.
    """
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    return _fork(_join, [(see, rank, ranks, folder) for rank in range(ranks)])


def _fork(target: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> int:
    """Fork a process per element of ``arguments`` to run ``target``; return how many failed."""
    forking = multiprocessing.get_context("fork")
    processes = [forking.Process(target=target, args=each) for each in arguments]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running)):
            ended = running.pop(sentinel)  # type: ignore[call-overload]
            ended.join()
            for other in running.values() if ended.exitcode else ():
                other.kill()  # it would wait forever for the failed rank
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


def _be_a_rank(command: list[str], rank: int, port: int) -> None:
    """Run the command as a rank of torchrun: with its environment variables, as a client of its store."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.dup2(1, 2)  # stderr joins stdout, as on a terminal
    be_python(command)


def _main(commands: list[list[str]]) -> int:
    failed = 0
    for command in commands:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        failed += _fork(_be_a_rank, [(command, rank, store.port) for rank in range(2)])
        print(end="\f", flush=True)
    return failed


if __name__ == "__main__":
    imported, *commands = map(json.loads, sys.argv[1:])
    for module in imported:
        importlib.import_module(module)
    sys.exit(_main(commands))
