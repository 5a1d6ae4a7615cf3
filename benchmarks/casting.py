"""What does casting per operation add to an operation: the scope of O1 and O4 against ``torch.autocast``?

A tiny addition is not cast by either; a tiny linear is, with its weight. The times are of 1,000 calls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from _harness import Variant, arguments, report, time_variants
from torch import Tensor, nn

from halfpeak.casting.opcasts import OpCasts

CALLS = 1000


def repeat(call: Callable[[], Tensor], scope: AbstractContextManager[Any]) -> Variant:
    def run() -> None:
        with scope:
            for _ in range(CALLS):
                call()

    return run


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    low = torch.bfloat16
    x = torch.randn(4, 8, device=options.device)
    linear = nn.Linear(8, 8, device=options.device)
    calls: dict[str, Callable[[], Tensor]] = {"addition": lambda: x + x, "linear": lambda: linear(x)}
    for case, call in calls.items():
        variants = {
            "no casts": repeat(call, nullcontext()),
            "torch.autocast": repeat(call, torch.autocast(options.device, low)),
            "halfpeak": repeat(call, OpCasts(low)),
        }
        times = time_variants(variants, device=options.device, rounds=options.rounds)
        report("casting", f"1000 calls of {case}", times, baseline="torch.autocast", options=options)


if __name__ == "__main__":
    main()
