"""What does monitoring of the loss scale cost if no step is skipped?

A training step with the defaults of ``prepare`` is compared with a step without its handling of bad steps: no recovery
of the scale, no check of the loss (``scale=ScaleConfig()``), no report of skipped steps (``on_skip=None``).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from _harness import Variant, arguments, chosen, report, time_variants
from torch import nn

import halfpeak
from halfpeak.fused import FusedAdamW

CASES: dict[str, tuple[list[int], int]] = {
    "2 layers of 64": ([64] * 3, 32),
    "20 layers of 64": ([64] * 21, 32),
    "4 layers of 512": ([512] * 5, 64),
}
OPTIMIZERS: dict[str, Any] = {
    "torch.optim.AdamW": torch.optim.AdamW,
    "FusedAdamW": FusedAdamW,
}


def step(widths: list[int], batch: int, optimizer: Any, device: str, **settings: Any) -> Variant:
    """A whole training step in bfloat16, which a CPU supports, with the dynamic loss scale of O2."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    model = nn.Sequential(*layers).to(device)
    engine = halfpeak.prepare(
        model,
        optimizer(model.parameters(), lr=1e-5),
        halfpeak.LEVELS["O2"].replace(cast_model_type=torch.bfloat16),
        **settings,
    )
    x = torch.randn(batch, widths[0], device=device)

    def run() -> None:
        with engine.forward():
            loss = model(x).square().mean()
        engine.backward(loss)
        engine.step()

    for _ in range(3):
        run()
    return run


def main() -> None:
    options = arguments(__doc__, rounds=31)
    cases = {f"{name}, {kind}": (*CASES[name], OPTIMIZERS[kind]) for name in CASES for kind in OPTIMIZERS}
    for case in chosen(cases, options):
        widths, batch, optimizer = cases[case]
        variants = {
            "without": step(
                widths, batch, optimizer, options.device, scale=halfpeak.ScaleConfig(), on_skip=None
            ),
            "default": step(widths, batch, optimizer, options.device),
        }
        samples = time_variants(variants, device=options.device, rounds=options.rounds)
        report("default", case, samples, baseline="without", options=options)


if __name__ == "__main__":
    main()
