"""A loop of one's own over shards, with which the loops of others are compared: its data, and what it computes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import halfpeak
from distributed.launching import Seen, results, run_as_torchrun
from distributed.sharded_ranks import Block, Net
from halfpeak.distributed import fully_shard
from support.forks import python

SCALE = halfpeak.ScaleConfig(init=1024.0)
EVERY, PASSES, HALF = 2, 12, 6
OVERFLOW = 6  # of the last rank alone, in the first pass of a window
OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    # Its state after a step of zeros is not what it begins with.
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "FusedAdamW": partial(halfpeak.fused.FusedAdamW, lr=1e-2),
}


def is_head(name: str, module: nn.Module) -> bool:
    return name.rpartition(".")[2] == "head"


KEPT = [is_head]
"""Stays float32, whatever it is part of."""
Trained = tuple[list[str], list[bool]]
"""The losses of a rank, every digit of them, and which windows it stepped."""


def batch(number: int) -> Tensor:
    """This rank's part of a batch; one process has all parts."""
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(number))
    part = x.chunk(dist.get_world_size())[dist.get_rank()]
    return part * torch.inf if number == OVERFLOW and dist.get_rank() == dist.get_world_size() - 1 else part


def net() -> Net:
    torch.manual_seed(0)
    return Net(6)


def as_torchrun(rank: int, ranks: int) -> None:
    """Set torchrun's environment variables."""
    given = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }
    os.environ |= {name: str(value) for name, value in given.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def on_accelerators() -> None:
    """Let accelerate take this process, which has gloo alone, for one with an accelerator: only there it shards."""
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    for kept in (AcceleratorState, GradientState, PartialState):
        kept._reset_state()
    if hasattr(PartialState.__init__, "__wrapped__"):
        return

    @wraps(PartialState.__init__)
    def initialise(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        initialise.__wrapped__(self, cpu=True, **kwargs)
        if self.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = initialise  # type: ignore[method-assign]


def own(level: str, optimizer: str = "AdamW", *, reduces_all: bool = False) -> tuple[Trained, nn.Module]:
    """Train; ``reduces_all`` reduces the gradients of every pass, instead of those of a window at its end."""
    model = fully_shard(net(), level, blocks=Block, keep_fp32=KEPT)
    stepped = OPTIMIZERS[optimizer](model.parameters())
    engine = halfpeak.prepare(model, stepped, level, accumulate=EVERY, scale=SCALE, keep_fp32=KEPT)
    schedule = torch.optim.lr_scheduler.StepLR(stepped, 1, 0.9)
    losses, outcomes = list[str](), list[bool]()
    warnings.filterwarnings("error", "the gradients of each pass inside a window")  # FSDP2 has them
    for number in range(PASSES):
        with engine.forward(None if reduces_all else model):
            loss = model(batch(number)).float().square().mean()
        engine.backward(loss)
        if engine.micro_step % EVERY == EVERY - 1:
            engine.unscale()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        result = engine.step()
        losses.append(repr(loss.item()))
        if result.boundary:
            outcomes.append(result.stepped())
            if outcomes[-1]:
                schedule.step()
    return (losses, outcomes), model


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().full_tensor() for name, value in model.named_parameters()}  # type: ignore[attr-defined]


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


BOTH = """
import sys, {module} as found, distributed.launching as each
folder = sys.argv[1]
for ranks in "21":
    sys.argv[1:] = ranks, f"{{folder}}/{{ranks}}"
    if each.fork_ranks(found.see):
        sys.exit(1)
"""
"""Forks the ranks of both launches, because importing a library takes seconds."""


def two_then_one(module: str, folder: Path) -> Callable[[int], Seen]:
    """What two ranks have seen, and then one, which loads what the two have saved; by the number of ranks."""
    for ranks in "21":
        (folder / ranks).mkdir()
    done = python("-c", BOTH.format(module=module), str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return lambda ranks: results(folder / str(ranks), ranks)


def run_script(text: str, folder: Path, library: str, *, needs_accelerators: bool = False) -> list[str]:
    """Run a script of a page over a library in a folder, as torchrun runs it; returns the lines that it has printed."""
    before = f"import os; os.chdir({str(folder)!r})\n"
    if needs_accelerators:
        before += "from integrations.shard_loop import on_accelerators as before; before()\n"
    file = folder / "train.py"
    file.write_text(before + text)
    (printed,) = run_as_torchrun([str(file)], imported=[f"halfpeak.integrations.{library}"])
    return printed.splitlines()
