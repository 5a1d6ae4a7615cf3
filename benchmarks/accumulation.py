"""What does accumulating gradients cost, per backward pass?

One and four backward passes per step are measured. Batches have few rows, so that work per weight dominates: casts of
weights, unscaling, accumulation and, once per step, the update. ``torch.autocast``, O1 and O4 cast every weight in
every pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from _harness import Variant, arguments, chosen, report, time_variants
from _nets import GPT, mlp
from torch import Tensor, nn

import halfpeak
from halfpeak.fused import FusedAdamW

NATIVE = "native AMP"
RATE = 1e-4
PASSES = (1, 4)


def main() -> None:
    options = arguments(__doc__)
    device = options.device
    random = torch.Generator().manual_seed(0)
    nets: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
        "MLP, 4 layers of 1024, 32 rows": (mlp, torch.randn(32, 1024, generator=random).to(device)),
        "GPT, width 256, 4 layers, 64 words": (
            GPT,
            torch.randint(1024, (1, 64), generator=random).to(device),
        ),
    }
    cases = {f"{name}, {passes} to a step": (*nets[name], passes) for name in nets for passes in PASSES}
    for case in chosen(cases, options):
        build, x, passes = cases[case]
        variants = makers(build, x, device, passes)
        samples = time_variants(variants, device=device, rounds=options.rounds)
        each = {
            variant: [type(one)(one.cpu / passes, one.wall / passes) for one in taken]
            for variant, taken in samples.items()
        }
        report("accumulation", case, each, baseline=NATIVE, options=options)


def makers(build: Callable[[], nn.Module], x: Tensor, device: str, passes: int) -> dict[str, Variant]:
    low = torch.bfloat16 if device == "cpu" else torch.float16
    per_op = halfpeak.LEVELS["O4" if low is torch.bfloat16 else "O1"].replace(loss_scale="dynamic")
    levels: dict[str, dict[str, Any]] = {
        "per operation, torch's lists": {"level": per_op},
        "per operation, apex's lists": {"level": per_op, "op_lists": "apex"},
        "O2": {"level": halfpeak.LEVELS["O2"].replace(cast_model_type=low)},
    }
    return {
        "float32": by_hand(build, x, device, passes, None),
        NATIVE: by_hand(build, x, device, passes, low),
        **{
            f"halfpeak {name}": with_engine(build, x, device, passes, **level)
            for name, level in levels.items()
        },
    }


def by_hand(
    build: Callable[[], nn.Module], x: Tensor, device: str, passes: int, low: torch.dtype | None
) -> Variant:
    model = started(build, device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=low is not None)

    def run() -> None:
        for _ in range(passes):
            with nullcontext() if low is None else torch.autocast(torch.device(device).type, low):
                loss = loss_of(model(x))
            scaler.scale(loss / passes).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return run


def with_engine(
    build: Callable[[], nn.Module], x: Tensor, device: str, passes: int, level: Any, **how: Any
) -> Variant:
    model = started(build, device)
    optimizer = FusedAdamW(model.parameters(), lr=RATE)
    engine = halfpeak.prepare(model, optimizer, level, clip=1.0, accumulate=passes, **how)

    def run() -> None:
        for _ in range(passes):
            with engine.forward():
                loss = loss_of(model(x))
            engine.backward(loss)
            engine.step()

    return run


def started(build: Callable[[], nn.Module], device: str) -> nn.Module:
    torch.manual_seed(1)
    return build().to(device)


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


if __name__ == "__main__":
    main()
