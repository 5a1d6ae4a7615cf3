"""torch's Muon for the matrices beside AdamW for the rest, in one engine: to the bit the loop that one writes by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from promises.by_hand import Loop, parameters
from promises.cases import Case, loss_of, rows, run

OVERFLOWS = 4
"""The pass whose gradients are infinite."""


def muon_and_adamw(nets: Sequence[nn.Module]) -> list[Optimizer]:
    every = parameters(nets)
    return [
        torch.optim.Muon([p for p in every if p.ndim == 2], lr=0.02),
        torch.optim.AdamW([p for p in every if p.ndim != 2], lr=0.01, eps=1e-4),
    ]


def steps(loop: Loop, every: int) -> Iterator[None]:
    for seed in range(12):
        loop.backward(loss_of(loop, seed) * (math.inf if seed == OVERFLOWS else 1.0))
        window, position = divmod(seed, every)
        assert loop.step() == (position == every - 1 and window != OVERFLOWS // every)
        yield


@rows(
    {
        "steps": Case(partial(steps, every=1), makes=muon_and_adamw),
        "windows, clipped": Case(
            partial(steps, every=3), makes=muon_and_adamw, options={"every": 3, "clip": 0.25}
        ),
    }
)
def test_it_trains_as_a_loop_by_hand(case: Case, level: str) -> None:
    (ours,) = run(case, level)
    assert int(ours.engine.num_skipped) == 1
