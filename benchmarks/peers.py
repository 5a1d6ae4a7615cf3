"""What do small forms of AdamW's state cost, beside those of other libraries: in bytes, in time, in quality?

    bytes   per parameter between two steps: weights, gradients in the weights' dtype, and all that the optimizer keeps
    time    of a step after the last backward pass, clipped by norm: halfpeak's by an engine, which also looks for inf
            and NaN, the others' by ``clip_grad_norm_`` and ``optimizer.step``
    loss    of the GPT of ``halfpeak train pysource --size tiny`` after 500 steps, a mean of the last 50; a round is a
            seed. To be read beside the differences between seeds

All have weights in bfloat16, except for the norms of halfpeak's GPT. Libraries that are not installed, or need a CUDA
device where there is none, are named and left out; ``torch.compile``, which torchao uses, needs a C++ compiler.

python benchmarks/peers.py --only time --rounds 11
python benchmarks/peers.py --only loss --rounds 3
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _harness import Variant, arguments, describe, report, save, time_variants
from _rivals import Optimizers, compact
from memory import held
from quality import BATCH, CONTEXT, WARMUP, Loop, train, with_engine, without_engine
from step import Shape, build, gpt, hand_over
from step import with_engine as step_of_engine
from torch import nn

from halfpeak.fused import FusedAdamW
from halfpeak.recipes.pysource import PySource

FORMS: dict[str, Optimizers] = {
    "halfpeak, torch.optim.AdamW": functools.partial(torch.optim.AdamW, fused=True),
    **{
        f"halfpeak, FusedAdamW{name}": functools.partial(FusedAdamW, **form)
        for name, form in {
            "": {},
            ", remainders, bfloat16 moments": {"master": "remainder", "moments": torch.bfloat16},
            ", 8-bit remainders and moments": {"master": "remainder8", "moments": "int8"},
        }.items()
    },
}
BASELINE = next(iter(FORMS))
CASE = "a transformer, 99 tensors, 23 M"
STEPS, LAST = 500, 50
TRAINING = f"GPT of 0.8 M parameters, {STEPS} steps of {BATCH} x {CONTEXT} bytes"


def main() -> None:
    options = arguments(__doc__)
    peers = compact(options.device)
    for name, measure in {"bytes": measure_bytes, "time": measure_time, "loss": measure_loss}.items():
        if options.only in name:
            measure(peers, options)


def measure_bytes(peers: dict[str, Optimizers], options: argparse.Namespace) -> None:
    print(f"\npeers_bytes: {CASE} on {describe(options)}")
    shapes = shapes_of(options)
    rows: list[dict[str, object]] = []
    for name, make in steps_of(peers, shapes, options.device).items():
        before = held(options.device)
        run = make()
        for _ in range(2):
            run()
        each = (held(options.device) - before) / sum(map(math.prod, shapes))
        rows.append({"case": CASE, "variant": name, "bytes": round(each, 2)})
        print(f"  {name:52}{each:8.2f} bytes a parameter", flush=True)
        del run
    save("peers_bytes", rows, options)


def measure_time(peers: dict[str, Optimizers], options: argparse.Namespace) -> None:
    variants = {name: make() for name, make in steps_of(peers, shapes_of(options), options.device).items()}
    samples = time_variants(variants, device=options.device, rounds=options.rounds)
    report("peers_time", CASE, samples, baseline=BASELINE, options=options)


def measure_loss(peers: dict[str, Optimizers], options: argparse.Namespace) -> None:
    print(f"\npeers_loss: {TRAINING} on {describe(options)}, {options.rounds} seeds")
    data = PySource("tiny", CONTEXT, BATCH, torch.device(options.device))
    loops: dict[str, Callable[[nn.Module], Loop]] = {
        **{name: functools.partial(with_engine, make=make) for name, make in FORMS.items()},
        **{name: functools.partial(without_engine, make=make) for name, make in peers.items()},
    }
    steps, last = (WARMUP + 5, 5) if options.quick else (STEPS, LAST)
    rows: list[dict[str, object]] = []
    found: dict[str, list[float]] = {name: [] for name in loops}
    for seed in range(options.rounds):
        for name, loop_of in loops.items():
            loss = statistics.mean(train(data, loop_of, seed, steps)[-last:])
            found[name].append(loss)
            rows.append({"case": TRAINING, "variant": name, "seed": seed, "loss": round(loss, 5)})
            print(f"  seed {seed}  {name:52}{loss:8.4f} nats a byte", flush=True)
    for name, losses in found.items():
        more = statistics.mean(mine - base for mine, base in zip(losses, found[BASELINE], strict=True))
        print(f"  mean    {name:52}{statistics.mean(losses):8.4f} nats a byte, {more:+.4f}")
    save("peers_loss", rows, options)


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    return gpt(layers=1, width=128) if options.quick else gpt()


def steps_of(
    peers: dict[str, Optimizers], shapes: Sequence[Shape], device: str
) -> dict[str, Callable[[], Variant]]:
    """What makes the variants, each with memory of its own."""
    ours = {
        name: functools.partial(step_of_engine, shapes, device, make, "O5") for name, make in FORMS.items()
    }
    return {
        **ours,
        **{name: functools.partial(plain_step, shapes, device, make) for name, make in peers.items()},
    }


def plain_step(shapes: Sequence[Shape], device: str, make: Optimizers) -> Variant:
    parameters = list(build(shapes, device).to(torch.bfloat16))
    optimizer = make(parameters, lr=1e-3)
    gradients: list[Any] = [torch.full_like(p, 0.01) for p in parameters]

    def run() -> None:
        hand_over(parameters, gradients)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


if __name__ == "__main__":
    main()
