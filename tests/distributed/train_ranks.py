"""Ranks of ``test_train_ranks.py``: each runs ``halfpeak train`` as under torchrun."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch.distributed as dist
from rich.console import Console

from halfpeak.cli.options import parse
from halfpeak.cli.train_run import train
from halfpeak.core.errors import HalfpeakError
from halfpeak.distributed.launched import ALONE, Ranks
from halfpeak.recipes import pysource

STEPS = 6
STOPPED = 4
"""The step after which a run is stopped, to be continued later."""

COMMON = f"--steps {STEPS} --eval-every 3 --save-every 5 --tensorboard false --plot false".split()
RECIPES = {
    "digits": ["digits", "--batch", "16"],
    "pysource": ["pysource", "--batch", "4", "--context", "16", "--accumulate", "2"],
}
CASES = {
    f"{recipe} {level} {'shards' if shard else 'copies'}": [*RECIPES[recipe], "--level", level, "--shard", str(shard)]
    for recipe, level in (("digits", "O2"), ("pysource", "O0"), ("pysource", "O5"))
    for shard in (False, True)
}  # fmt: skip
SHARED = (("pysource O5 shards", "pysource O5 copies"), ("pysource O5 copies", "pysource O5 shards"))
"""Pairs of cases: a run is stopped as the first, and continued as the second."""


TEXT = Path(__file__).read_bytes()
HELD_OUT = TEXT[:400]


def run(ranks: Ranks, *arguments: str, stop: Callable[[], bool] = lambda: False) -> str:
    """Run the command on this rank; return what it printed, or the error."""
    printed = io.StringIO()
    console = Console(file=printed, width=120, quiet=not ranks.is_first)
    try:
        # Reading the whole standard library would take seconds in every run.
        with patch.object(pysource, "_read", Mock(return_value=(TEXT, HELD_OUT))):
            train(parse([*arguments]), console, stop, ranks=ranks)
    except HalfpeakError as error:
        return f"{type(error).__name__}: {error}"
    return printed.getvalue()


def begin(ranks: Ranks, name: str, output: str, *, asked: int) -> str:
    """Run until rank ``asked``, and no other rank, is asked to stop; return what it printed."""
    steps = iter(range(1, STEPS + 1))
    return run(
        ranks,
        *CASES[name],
        *COMMON,
        "--output",
        output,
        stop=lambda: next(steps) == STOPPED and ranks.rank == asked,
    )


def go_on(ranks: Ranks, name: str, output: str) -> str:
    return run(ranks, *CASES[name], *COMMON, "--output", output, "--resume", "auto")


def scenarios(ranks: Ranks) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name in CASES:
        seen[name] = go_on(ranks, name, f"whole {name}")
        seen[f"{name} stopped"] = begin(ranks, name, f"parts {name}", asked=1)
        seen[f"{name} resumed"] = go_on(ranks, name, f"parts {name}")
    for first, second in SHARED:
        begin(ranks, first, f"{first} then {second}", asked=0)
        seen[f"{first} then {second}"] = go_on(ranks, second, f"{first} then {second}")
    for name in ("pysource O5 copies", "pysource O5 shards"):
        begin(ranks, name, f"{name} then one process", asked=0)
    seen["not divided"] = run(ranks, "digits", "--batch", "17", "--steps", "1")
    seen["used folder"] = run(ranks, "digits", "--steps", "1", "--output", "whole digits O2 copies")
    seen["one device"] = run(ranks, "digits", "--device", "cpu:0", "--steps", "1")
    return seen


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    os.chdir(folder)
    seen = scenarios(Ranks(rank, ranks, rank, has_group=True))
    dist.barrier()
    dist.destroy_process_group()
    seen["no processes"] = run(ALONE, "digits", "--shard", "true", "--steps", "1")
    return seen
