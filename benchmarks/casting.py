"""What does casting per operation cost: O1 and O4 against ``torch.autocast``?

Single operations: relu, which no list casts; addition, which only apex's lists treat; softmax, float32 in apex's lists;
linear, whose weights all lists cast. Each time is of 1,000 calls without a backward pass, whose results are dropped at
once, and with them halfpeak's weakly referenced casts of weights, while autocast keeps its casts. Then whole nets,
forward and backward, with much or little overhead per operation, and with one or four backward passes a step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from _harness import Variant, arguments, report, time_variants
from torch import Tensor, nn

from halfpeak.casting.casts import DeviceCasts, OpCasts

CALLS = 1000
LOW = torch.bfloat16

Scope = AbstractContextManager[Any]


def scopes(device: str) -> dict[str, Callable[[], Scope]]:
    """For each variant, a function that makes the scope of a forward pass."""
    device_type = torch.device(device).type
    apex, lists = OpCasts(LOW), DeviceCasts(device_type, LOW)
    return {
        "no casts": nullcontext,
        "torch.autocast": lambda: torch.autocast(device_type, LOW),
        "torch.autocast, cache off": lambda: torch.autocast(device_type, LOW, cache_enabled=False),
        "halfpeak, torch's lists": lambda: lists,
        "halfpeak, apex's lists": lambda: apex,
    }


def repeat(call: Callable[[], Tensor], make: Callable[[], Scope]) -> Variant:
    def run() -> None:
        with make():
            for _ in range(CALLS):
                call()

    return run


def operations(device: str) -> dict[str, Callable[[], Tensor]]:
    x = torch.randn(4, 8, device=device)
    linear = nn.Linear(8, 8, device=device)
    return {
        "relu": lambda: torch.relu(x),
        "addition": lambda: x + x,
        "softmax": lambda: torch.softmax(x, -1),
        "linear": lambda: linear(x),
    }


class Block(nn.Module):
    """A residual block of a transformer, without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def window(net: nn.Module, x: Tensor, passes: int, make: Callable[[], Scope]) -> Variant:
    """Forward and backward, ``passes`` times."""

    def run() -> None:
        for _ in range(passes):
            with make():
                loss = net(x).float().square().mean()
            loss.backward()
        for parameter in net.parameters():
            parameter.grad = None

    return run


NETS: dict[str, tuple[int, int, int]] = {
    "overhead-bound: 8 blocks of width 32, 8 rows": (8, 32, 8),
    "2 blocks of width 512, 256 rows": (2, 512, 256),
}
"""Blocks, width and rows."""


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    for case, call in operations(options.device).items():
        variants = {name: repeat(call, make) for name, make in scopes(options.device).items()}
        times = time_variants(variants, device=options.device, rounds=options.rounds)
        report("casting", f"1000 calls of {case}", times, baseline="torch.autocast", options=options)
    for name, (blocks, width, rows) in NETS.items():
        for passes in (1, 4):
            net = nn.Sequential(*(Block(width) for _ in range(blocks))).to(options.device)
            x = torch.randn(rows, width, device=options.device)
            variants = {
                variant: window(net, x, passes, make) for variant, make in scopes(options.device).items()
            }
            times = time_variants(variants, device=options.device, rounds=options.rounds)
            case = f"{name}, forward and backward, {passes} a step"
            report("casting", case, times, baseline="torch.autocast", options=options)


if __name__ == "__main__":
    main()
