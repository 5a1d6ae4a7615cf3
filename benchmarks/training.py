"""What does a whole training step cost: forward, backward, clip, AdamW?

Every loop trains the same network on the same batch from the same start, clips by norm and steps AdamW. Native AMP is
``torch.autocast``, ``GradScaler``, ``clip_grad_norm_`` and ``AdamW(fused=True)``. "No scaler" omits ``GradScaler``,
which bfloat16 permits. halfpeak's levels use FusedAdamW unless stated otherwise. The low-precision dtype is bfloat16
for "no scaler", O4 and O5, and on a CPU, where float16 is slower than float32; elsewhere it is float16. Loops whose
losses are not close to float32's are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from _harness import arguments, chosen, report, time_variants
from _nets import Task, tasks
from _rivals import loops
from torch import nn

import halfpeak
from halfpeak.fused import FusedAdamW

Step: TypeAlias = Callable[[], torch.Tensor]
"""Takes one step and returns its loss."""

NATIVE = "native AMP"
RATE = 1e-4
STEPS = 8
"""Steps that every loop takes before it is timed."""


def main() -> None:
    options = arguments(__doc__)
    device = options.device
    by_case = tasks(device)
    for case in chosen(by_case, options):
        task = by_case[case]
        variants = {name: make() for name, make in makers(task, device).items()}
        losses = {name: [float(run().detach()) for _ in range(STEPS)] for name, run in variants.items()}
        refuse_strays(losses)
        samples = time_variants(variants, device=device, rounds=options.rounds)
        report("training", case, samples, baseline=NATIVE, options=options)


def makers(task: Task, device: str) -> dict[str, Callable[[], Step]]:
    """Functions that build the loops, by name."""
    low = torch.bfloat16 if device == "cpu" else torch.float16
    per_op = halfpeak.LEVELS["O4" if low is torch.bfloat16 else "O1"].replace(loss_scale="dynamic")
    half = halfpeak.LEVELS["O2"].replace(cast_model_type=low)
    levels: dict[str, dict[str, Any]] = {
        "per operation, torch's lists": {"level": per_op},
        "per operation, apex's lists": {"level": per_op, "op_lists": "apex"},
        "O4, torch's lists": {"level": "O4"},
        "O2": {"level": half},
        "O5": {"level": "O5"},
    }
    return {
        "float32": lambda: by_hand(task, device, None),
        NATIVE: lambda: by_hand(task, device, low, scaled=True),
        "native AMP, no scaler": lambda: by_hand(task, device, torch.bfloat16),
        **{
            f"halfpeak {name}": lambda level=level: with_engine(task, device, **level)
            for name, level in levels.items()
        },
        "halfpeak O2, AdamW(fused=True)": lambda: with_engine(
            task, device, level=half, optimizer=torch_adamw
        ),
        **{
            name: lambda loop=loop: loop(task.loss, *start(task, device), low)
            for name, loop in loops(device).items()
        },
    }


def torch_adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def start(task: Task, device: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A new network with the common initial weights, torch's fused optimizer, and the batch."""
    model = build(task, device)
    return model, torch_adamw(model.parameters(), RATE), task.x


def build(task: Task, device: str) -> nn.Module:
    torch.manual_seed(1)
    model = task.build().to(device)
    if task.channels_last:
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] # a documented overload
    return model


def by_hand(task: Task, device: str, low: torch.dtype | None, *, scaled: bool = False) -> Step:
    model, optimizer, x = start(task, device)
    parameters = list(model.parameters())
    scaler = torch.amp.GradScaler(device, enabled=scaled)

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, low or torch.bfloat16, enabled=low is not None):
            loss = task.loss(model(x))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return run


def with_engine(
    task: Task, device: str, level: Any, *, optimizer: Callable[..., Any] = FusedAdamW, **how: Any
) -> Step:
    model = build(task, device)
    engine = halfpeak.prepare(model, optimizer(model.parameters(), lr=RATE), level, clip=1.0, **how)

    def run() -> torch.Tensor:
        with engine.forward():
            loss = task.loss(model(task.x))
        engine.backward(loss)
        engine.step()
        return loss

    return run


def refuse_strays(losses: dict[str, list[float]]) -> None:
    """Refuse a loop whose last loss is far from float32's, because a loop that does not train must not be timed."""
    first, *_, last = losses["float32"]
    for name, values in losses.items():
        if not abs(values[-1] - last) <= 0.1 * abs(first - last) + 0.01 * abs(last):
            raise RuntimeError(
                f"the loss of {name} went from {values[0]:.4f} to {values[-1]:.4f}, too far from float32's ({first:.4f} to "
                f"{last:.4f}); a loop that does not train is not timed"
            )


if __name__ == "__main__":
    main()
