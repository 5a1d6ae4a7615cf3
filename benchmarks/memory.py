"""How many bytes does a step hold for each parameter?

Weights, gradients, masters, moments and whatever else is left between two steps, with clipping and a dynamic loss scale: all
storages of living tensors, counted from outside. "More in the step" is what an accelerator's allocator gives out above
that while a step is taken; the CPU's does not tell.
"""

from __future__ import annotations

import functools
import gc
import math
from typing import Any

import torch
from _harness import Variant, arguments, chosen, describe, save
from step import by_hand, gpt, with_engine, with_grad_scaler

from halfpeak.fused import FusedAdamW

CASE = "a transformer, 99 tensors, 23 M"
FORMS: dict[str, dict[str, Any]] = {
    "": {},
    ", remainders": {"master": "remainder"},
    ", remainders, bfloat16 moments": {"master": "remainder", "moments": torch.bfloat16},
    ", 8-bit remainders and moments": {"master": "remainder8", "moments": "int8"},
}


def main() -> None:
    options = arguments(__doc__, rounds=1)
    shapes = gpt()
    fused, foreach = (functools.partial(torch.optim.AdamW, **{kind: True}) for kind in ("fused", "foreach"))
    makers = {
        "by hand, AdamW(fused=True)": functools.partial(by_hand, make=fused),
        "by hand, AdamW(foreach=True)": functools.partial(by_hand, make=foreach),
        "GradScaler, float32, AdamW(fused=True)": functools.partial(with_grad_scaler, make=fused),
        "halfpeak O2, AdamW(fused=True)": functools.partial(with_engine, make=fused),
        **{
            f"halfpeak O2, FusedAdamW{name}": functools.partial(
                with_engine, make=functools.partial(FusedAdamW, **form), low=torch.bfloat16
            )
            for name, form in FORMS.items()
        },
    }
    if not chosen([CASE], options):
        return
    print(f"\nmemory: {CASE} on {describe(options)}")
    count = sum(map(math.prod, shapes))
    rows: list[dict[str, object]] = []
    for name, make in makers.items():
        before = held(options.device)
        run = make(shapes, options.device)
        for _ in range(2):
            run()
        each = (held(options.device) - before) / count
        more = more_in(run, options.device)
        rows.append(
            {
                "case": CASE,
                "variant": name,
                "bytes": round(each, 2),
                "more": "" if more is None else round(more / count, 2),
            }
        )
        print(
            f"  {name:52}{each:8.2f} bytes a parameter{'' if more is None else f', {more / count:.2f} more in the step'}"
        )
        del run
    save("memory", rows, options)


def held(device: str) -> int:
    """Bytes of all storages of living tensors on a device."""
    gc.collect()
    storages: dict[int, int] = {}
    # By type alone: some objects of torch warn when they are looked at, and the compiler's stand-ins have no memory.
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    for tensor in [*tensors, *(t.grad for t in tensors if t.is_leaf and t.grad is not None)]:
        if tensor.device.type == torch.device(device).type:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def more_in(run: Variant, device: str) -> int | None:
    """Bytes that a step takes for its duration."""
    if not device.startswith("cuda"):
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
