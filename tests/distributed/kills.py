"""Kills random ranks of ``torchrun -m halfpeak train --resume auto`` at random moments, and compares the results.

``python tests/distributed/kills.py KILLS [RANKS]`` runs until it has killed ``KILLS`` ranks.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from halfpeak.checkpoint import file as checkpoint
from support.forks import ENVIRONMENT
from support.states import differences

STEPS = 40


def start(
    folder: Path,
    *,
    restarts: int = 0,
    ranks: int = 2,
    shard: bool = False,
    monitor: float = 0.1,
    launcher: str = "torch.distributed.run",
) -> subprocess.Popen[str]:
    """Start a run with skipped steps and windows of two passes, saved after every step; torchrun polls it."""
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", f"--monitor-interval={monitor}"]
    options += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return subprocess.Popen(
        [sys.executable, "-m", launcher, *options, *command(folder, shard=shard)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def command(folder: Path, *, shard: bool = False) -> list[str]:
    """The command of each rank."""
    settings = f"--steps {STEPS} --level O2 --batch 8 --accumulate 2 --init-loss-scale 2**24 --eval-every 0"
    files = f"--save-every 1 --log-every 1 --tensorboard false --plot false --shard {shard} --resume auto"
    return ["-m", "halfpeak", "train", "digits", *settings.split(), *files.split(), "--output", str(folder)]


def finish(run: subprocess.Popen[str]) -> str:
    """Wait for the end of a run, assert that it succeeded, and return what it printed."""
    printed, _ = run.communicate(timeout=900)
    assert run.returncode == 0, printed
    return printed


def wait_for_rows(run: subprocess.Popen[str], folder: Path, more_than: int) -> int:
    """Wait until a run has written more rows of metrics; return their bytes, or -1 if the run has ended."""
    while run.poll() is None:
        size = (folder / "metrics.jsonl").stat().st_size if (folder / "metrics.jsonl").exists() else 0
        if size > more_than:
            return size
        wait(run, 0.02)
    return -1


def wait(run: subprocess.Popen[str], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        run.wait(seconds)


def ranks_of(run: subprocess.Popen[str]) -> list[int]:
    """The live processes that torchrun has started."""
    try:
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"--level" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    except OSError:
        return []


def kill(folder: Path, kills: int, *, seed: int = 0, start_up: float = 10, **options: Any) -> tuple[int, str]:
    """Run, and kill up to ``kills`` ranks; return the number killed, and what the run printed.

    Most kills follow a new step, so that the run makes progress. Every third kill comes at a random moment in the next
    ``start_up`` seconds, the longest time that ranks take to start.
    """
    draw = random.Random(seed)
    run = start(folder, restarts=kills, **options)
    size = done = 0
    while done < kills:
        if done % 3 == 2:
            wait(run, start_up * draw.random())
        else:
            size = wait_for_rows(run, folder, size)
            wait(run, draw.random() / 2)  # a random moment in the next steps
        if run.poll() is not None:
            break
        alive = ranks_of(run)
        if alive:
            os.kill(draw.choice(alive), signal.SIGKILL)
            done += 1
    return done, finish(run)


def changed(one: Path, other: Path) -> set[str]:
    """The paths of the states, and files, in which two runs differ that should be equal."""
    first, second = (checkpoint.load(path / "checkpoint.pt") for path in (one, other))
    # The run neither seeds NumPy's generator nor draws from it.
    found = {at for at in differences(first, second) if not at.startswith("/random/numpy")}
    found -= {"/seconds", "/plan/output"}
    rows = [(path / "metrics.jsonl").read_bytes() for path in (one, other)]
    return found if rows[0] == rows[1] else {*found, "metrics.jsonl"}


def main(kills: int, ranks: int) -> int:
    killed = runs = lost = 0
    for shard in (False, True):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            finish(start(folder / "calm", ranks=ranks, shard=shard))
            while killed < kills * (1 + shard) // 2:
                output = folder / f"run{runs}"
                done, _ = kill(output, 6, seed=runs, ranks=ranks, shard=shard)
                killed, runs = killed + done, runs + 1
                lost += bool(changed(folder / "calm", output))
                print(
                    f"{killed} kills in {runs} runs of {ranks} ranks, {lost} that came to other bits",
                    flush=True,
                )
    return lost


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2))
