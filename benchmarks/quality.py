"""What do smaller weights and moments cost in quality?

The GPT of ``halfpeak train pysource --size tiny`` is trained at O5 with each form that FusedAdamW can store its state
in, over the source text of Python's standard library. All forms of a seed begin with the same weights and see the same
batches, and no text is seen twice, so that the loss of a step is that of new text. The differences between forms are to
be read beside those between seeds.

A round is a seed. The loss of a row is the mean over the steps since the row before, in nats per byte.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from _harness import arguments, chosen, describe, save
from _rivals import Optimizers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import halfpeak
from halfpeak.fused import FusedAdamW
from halfpeak.recipes.pysource import PySource

CONTEXT, BATCH = 64, 4
STEPS, WARMUP, EVERY = 3000, 100, 150
FORMS: dict[str, dict[str, Any]] = {
    "float32 masters and moments": {},
    "remainders, bfloat16 moments": {"master": "remainder", "moments": torch.bfloat16},
    "float32 masters, int8 moments": {"moments": "int8"},
    "8-bit remainders, int8 moments": {"master": "remainder8", "moments": "int8"},
}
CASE = f"GPT of 0.8 M parameters, {STEPS:,} steps of {BATCH} x {CONTEXT} bytes"


def main() -> None:
    options = arguments(__doc__, rounds=3)
    if not chosen([CASE], options):
        return
    steps = EVERY if options.quick else STEPS
    data = PySource("tiny", CONTEXT, BATCH, torch.device(options.device))
    print(f"\nquality: {CASE} on {describe(options)}, {options.rounds} seeds")
    rows: list[dict[str, object]] = []
    for seed in range(options.rounds):
        for name, form in FORMS.items():
            each = train(data, lambda model, form=form: with_engine(model, FusedAdamW, **form), seed, steps)
            losses = [statistics.mean(each[step - EVERY : step]) for step in range(EVERY, steps + 1, EVERY)]
            for step, loss in zip(range(EVERY, steps + 1, EVERY), losses, strict=True):
                rows.append(
                    {"case": CASE, "variant": name, "seed": seed, "step": step, "loss": round(loss, 5)}
                )
            print(f"  seed {seed}  {name:40}{losses[-1]:8.4f} nats a byte", flush=True)
    save("quality", rows, options)


class Loop(NamedTuple):
    """How a model is trained.

    Attributes:
        optimizer: whose learning rates a schedule sets.
        forward: makes the context of a forward pass.
        backward: takes the loss.
        step: returns whether it has stepped.
    """

    optimizer: torch.optim.Optimizer
    forward: Callable[[], AbstractContextManager[object]]
    backward: Callable[[Tensor], object]
    step: Callable[[], bool]


def with_engine(model: nn.Module, make: Optimizers, **form: Any) -> Loop:
    """At O5."""
    optimizer = make(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **form)
    engine = halfpeak.prepare(model, optimizer, "O5", clip=1.0)
    return Loop(optimizer, engine.forward, engine.backward, lambda: engine.step().stepped())


def without_engine(model: nn.Module, make: Optimizers) -> Loop:
    """In plain torch, with weights and gradients in bfloat16."""
    model.to(torch.bfloat16)
    optimizer = make(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step() -> bool:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return True

    return Loop(optimizer, nullcontext, Tensor.backward, step)


def train(data: PySource, loop_of: Callable[[nn.Module], Loop], seed: int, steps: int) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(seed)
    model = data.model().to(data.batch(torch.zeros(1, dtype=torch.long)).inputs.device)
    loop = loop_of(model)
    warm = torch.optim.lr_scheduler.LinearLR(loop.optimizer, 0.01, total_iters=WARMUP)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, steps - WARMUP, eta_min=1e-5)
    rates = torch.optim.lr_scheduler.SequentialLR(loop.optimizer, [warm, fall], [WARMUP])
    losses: list[float] = []
    for chosen_windows in torch.randperm(data.samples)[: steps * BATCH].split(BATCH):
        batch = data.batch(chosen_windows)
        with loop.forward():
            loss = cross_entropy(model(batch.inputs).flatten(0, 1).float(), batch.targets.flatten())
        loop.backward(loss)
        if loop.step():
            rates.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
