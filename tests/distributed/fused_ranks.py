"""Ranks of ``test_fused_ranks.py``: DDP with a fused optimizer whose gradients stay scaled until its step."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import halfpeak
from distributed.engine_ranks import batch, net
from halfpeak.fused import FusedAdamW
from halfpeak.runner.hooks.fp16 import Fp16OptimizerHook
from runner.loops import make_loop
from support.nets import make_batch, make_net

STEPS = 4
POISONED = 1
"""The window in which the loss of rank 1 is infinite."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "both": {"gradient_as_bucket_view": True, "static_graph": True},
}
MODES = ("master", "autocast")
NAMES = [
    f"{level} {name} {every} {how}"
    for level in ("O0", "O1", "O2", "O5")
    for name in CASES
    for every in (1, 2)
    for how in ("waits", "never waits")
]


def run(rank: int, name: str) -> dict[str, Any]:
    """Train; return the outcome, scale, masters and weights of this rank after each window."""
    level, *words, how = name.replace("never waits", "never").split()
    every, options = int(words.pop()), CASES[" ".join(words)]
    model = net()
    clip = None if how == "waits" else lambda grads: None
    engine = halfpeak.prepare(
        model,
        FusedAdamW(model.parameters(), lr=0.01, eps=1e-4),
        level,
        accumulate=every,
        clip=clip,
        scale=halfpeak.ScaleConfig(init=1024.0),
    )
    wrapped = DistributedDataParallel(model, **options)
    history: list[Any] = []
    for step in range(STEPS * every):
        with engine.forward(wrapped):
            loss = wrapped(batch(rank, step)).float().square().mean()
        spoilt = rank == 1 and step == POISONED * every
        engine.backward(loss * float("inf") if spoilt else loss)
        result = engine.step()
        if result.boundary:
            stepped = [
                p.detach().clone() for group in engine.optimizers[0].param_groups for p in group["params"]
            ]
            weights = [p.detach().clone() for p in model.parameters()]
            history.append([result.stepped(), engine.read_scale(), stepped, weights])
    return {"history": history}


def hooked(rank: int, mode: str) -> list[Any]:
    """Train with mmcv's fp16 hook, which reduces gradients itself."""
    loop = make_loop(make_net())
    loop.optimizer = FusedAdamW(loop.model.parameters(), lr=0.01, eps=1e-4)
    hook = Fp16OptimizerHook(mode=mode)  # type: ignore[arg-type]
    hook.before_run(loop)
    history: list[Any] = []
    for number in range(STEPS):
        loop.iter = number
        x, y = make_batch(10 * rank + number)
        with hook.around_train_step(loop) or nullcontext():
            loss = mse_loss(loop.model(x).float(), y)
        spoilt = rank == 1 and number == POISONED
        loop.outputs = {"loss": loss * float("inf") if spoilt else loss, "num_samples": len(x)}
        hook.after_train_iter(loop)
        history.append([p.detach().clone() for p in loop.model.parameters()])
    return history


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {name: run(rank, name) for name in NAMES}
    seen |= {f"hook {mode}": hooked(rank, mode) for mode in MODES}
    return seen
