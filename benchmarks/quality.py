"""What do smaller weights and moments cost in quality?

The GPT of ``halfpeak train pysource --size tiny`` is trained at O5 with each form that FusedAdamW can store its state
in, over the source text of Python's standard library. All forms of a seed begin with the same weights and see the same
batches, and no text is seen twice, so that the loss of a step is that of new text. The differences between forms are to
be read beside those between seeds.

A round is a seed. The loss of a row is the mean over the steps since the row before, in nats per byte.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from _harness import arguments, chosen, describe, save
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
            losses = list(train(data, form, seed, steps))
            rows += [
                {"case": CASE, "variant": name, "seed": seed, "step": step, "loss": round(loss, 5)}
                for step, loss in zip(range(EVERY, steps + 1, EVERY), losses, strict=True)
            ]
            print(f"  seed {seed}  {name:40}{losses[-1]:8.4f} nats a byte", flush=True)
    save("quality", rows, options)


def train(data: PySource, form: dict[str, Any], seed: int, steps: int) -> Iterator[float]:
    """The mean loss of each ``EVERY`` steps."""
    torch.manual_seed(seed)
    model = data.model().to(data.batch(torch.zeros(1, dtype=torch.long)).inputs.device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **form)
    engine = halfpeak.prepare(model, optimizer, "O5", clip=1.0)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=WARMUP)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - WARMUP, eta_min=1e-5)
    rates = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, fall], [WARMUP])
    windows = torch.randperm(data.samples)[: steps * BATCH].split(BATCH)
    losses: list[float] = []
    for step, chosen_windows in enumerate(windows, start=1):
        batch = data.batch(chosen_windows)
        with engine.forward():
            loss = cross_entropy(model(batch.inputs).flatten(0, 1).float(), batch.targets.flatten())
        engine.backward(loss)
        if engine.step().stepped():
            rates.step()
        losses.append(loss.item())
        if step % EVERY == 0:
            yield statistics.mean(losses[-EVERY:])


if __name__ == "__main__":
    main()
