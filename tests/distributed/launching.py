"""Starting ranks: a process that imports torch once and forks them, and what each of them saw.

The process is one for all tests of this process; it forks one for each script, which forks its ranks.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # the first optimizer imports it: here once, rather than in every rank
import torch.distributed as dist

from laws.source import ROOT

Seen = dict[str, list[Any]]
"""By scenario, what each rank saw."""


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def launch(script: str, ranks: int, folder: Path) -> Seen:
    """Run a script, whose path begins in this folder, and whose ranks each leave ``rank<number>.pt`` in ``folder``."""
    _run_python(str(Path(__file__).parent / script), str(ranks), str(folder))
    files = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]
    return {name: [one[name] for one in files] for name in files[0]}


def run_as_torchrun(*commands: list[str]) -> list[str]:
    """What each command has printed, run by two ranks that find themselves as those of torchrun do.

    Args:
        commands: one after another; each a script or ``-m`` and a module, and its arguments.
    """
    return _run_python(__file__, *map(json.dumps, commands)).split("\f")[:-1]


PRELOADED = (
    "halfpeak.cli.main",
    "halfpeak.distributed",
    "halfpeak.runner",
    "torch.distributed.tensor.parallel",
)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """What forks a process for each line of its input; it ends when that is closed."""
    command = [sys.executable, __file__, "serve"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(command, env=ENVIRONMENT, text=True, start_new_session=True, **pipes)
    assert server.stdin is not None
    atexit.register(server.stdin.close)
    return server


def _run_python(*arguments: str) -> str:
    """What a script has printed, which must have ended well."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        server.stdin.write(json.dumps([folder, *arguments]) + "\n")
        server.stdin.flush()
        try:
            status = server.stdout.readline()
        except BaseException:  # the timeout of a test: a rank waits for ever
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
            raise
        printed, errors = (Path(folder, name).read_text() for name in ("out", "err"))
    assert status.strip() == "0", errors
    return printed


def _serve() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        folder, *arguments = json.loads(line)
        child = os.fork()
        if not child:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
            _be_script(arguments)
        print(os.waitpid(child, 0)[1], flush=True)


def _be_script(arguments: list[str]) -> NoReturn:
    """What ``python`` does with a script or ``-m`` and a module."""
    status: Any = 0
    try:
        is_module = arguments[0] == "-m"
        sys.argv = arguments[is_module:]
        (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else status is not None)


def fork_ranks(see: Callable[[int, int, Path], dict[str, Any]]) -> int:
    """Fork the ranks that the command line asks for: each joins a group of gloo and saves what it sees.

    Returns:
        How many of them failed.
    """
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    return _fork(_join, [(see, rank, ranks, folder) for rank in range(ranks)])


def _fork(target: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> int:
    """How many failed of the processes that run ``target``, each with its arguments."""
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


def _be_a_rank(command: list[str], rank: int, port: int) -> None:
    """What torchrun tells a rank, which is a client of the store that torchrun keeps."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    _be_script(command)


def _main(commands: list[list[str]]) -> int:
    failed = 0
    for command in commands:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        failed += _fork(_be_a_rank, [(command, rank, store.port) for rank in range(2)])
        print(end="\f", flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        _serve()
    else:
        sys.exit(_main([json.loads(command) for command in sys.argv[1:]]))
