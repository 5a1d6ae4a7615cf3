"""What does float8 save of a whole training step on a GPU with a compiled model?

Four transformer blocks of width 4096 (or 1024), batches of 4 times 2048 (or 512) positions: bfloat16 (O5), and O5 with
each of torchao's recipes. Compiled, because separate launches to scale and cast to float8 cost more than float8 saves.

Needs a CUDA device with float8 (compute capability 8.9 or higher), torchao and triton.
"""

from __future__ import annotations

from typing import get_args

import torch
from _harness import Variant, arguments, chosen, report, time_variants
from _nets import Block
from torch import nn

import halfpeak
from halfpeak.core.policy import Float8Recipe
from halfpeak.fused import FusedAdamW

BASELINE = "O5, compiled"
CASES = {
    "4 blocks of width 4096, 4 x 2048": (4, 4096, (4, 2048)),
    "4 blocks of width 1024, 4 x 512": (4, 1024, (4, 512)),
}


def main() -> None:
    options = arguments(__doc__)
    if options.device == "cpu":
        print("a CPU emulates float8, which takes minutes and says nothing; run it on a GPU")
        return
    for case in chosen(CASES, options):
        layers, width, shape = CASES[case]
        x = torch.randn(*shape, width, device=options.device)
        variants: dict[str, Variant] = {BASELINE: trained(layers, x, None)}
        for recipe in get_args(Float8Recipe):
            variants[f"O5, float8={recipe!r}, compiled"] = trained(layers, x, recipe)
        samples = time_variants(variants, device=options.device, rounds=options.rounds)
        report("gpu_float8", case, samples, baseline=BASELINE, options=options)


def trained(layers: int, x: torch.Tensor, recipe: Float8Recipe | None) -> Variant:
    torch.manual_seed(0)
    width = x.shape[-1]
    model = nn.Sequential(*(Block(width, width // 128) for _ in range(layers))).to(x.device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-4)
    engine = halfpeak.prepare(model, optimizer, "O5", clip=1.0, float8=recipe)
    compiled = torch.compile(model)

    def run() -> torch.Tensor:
        with engine.forward():
            loss = (compiled(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        return loss

    return run


if __name__ == "__main__":
    main()
