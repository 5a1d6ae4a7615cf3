"""How many bytes does a step hold for each parameter?

Counted are the storages of all live tensors between two steps, with clipping and a dynamic loss scale: weights,
gradients, masters, moments and everything else. "More in the step" is the peak that a CUDA allocator reports during a
step, above that count; other allocators do not report it.

With several backward passes per step, the storages are counted when the last pass is almost over: they hold the
accumulated gradients, and those of the last pass that are not yet accumulated.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from _harness import Variant, arguments, chosen, describe, save
from _nets import GPT
from step import Shape, by_hand, gpt, with_engine, with_grad_scaler
from torch import Tensor, nn

import halfpeak
from halfpeak.fused import FusedAdamW

PASSES = 4
WINDOW = f"GPT, width 256, 4 layers, {PASSES} to a step"
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
                with_engine, make=functools.partial(FusedAdamW, **form)
            )
            for name, form in FORMS.items()
        },
    }
    if chosen([CASE], options):
        between_steps(makers, shapes, options)
    if chosen([WINDOW], options):
        in_a_window(options)


def between_steps(
    makers: Mapping[str, Callable[..., Variant]], shapes: Sequence[Shape], options: argparse.Namespace
) -> None:
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


def in_a_window(options: argparse.Namespace) -> None:
    print(f"\nmemory: {WINDOW} on {describe(options)}")
    rows: list[dict[str, object]] = []
    for form, stored in FORMS.items():
        name = f"{PASSES} passes, halfpeak O2, FusedAdamW{form}"
        each = round(most_in_window(options.device, stored), 2)
        rows.append({"case": WINDOW, "variant": name, "bytes": each, "more": ""})
        print(f"  {name:72}{each:8.2f} bytes a parameter")
    save("memory", rows, options)


def most_in_window(device: str, stored: dict[str, Any]) -> float:
    """Bytes per parameter when the last backward pass of a window reaches the first layer."""
    before = held(device)
    torch.manual_seed(0)
    model = GPT().to(device)
    engine = halfpeak.prepare(
        model,
        FusedAdamW(model.parameters(), **stored),
        halfpeak.LEVELS["O2"].replace(cast_model_type=torch.bfloat16),
        clip=1.0,
        accumulate=PASSES,
    )
    words = torch.randint(1024, (1, 16), device=device)
    found: list[int] = []

    def note(_: Tensor) -> None:
        found.append(held(device))

    def look(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(note)

    model.words.register_forward_hook(look)
    for _ in range(2 * PASSES):
        with engine.forward():
            loss = model(words).float().square().mean()
        engine.backward(loss)
        engine.step()
    return (found[-1] - before) / sum(map(Tensor.numel, model.parameters()))


def held(device: str) -> int:
    """Bytes of all storages of live tensors on a device."""
    gc.collect()
    storages: dict[int, int] = {}
    # Exact types, because isinstance triggers warnings in some torch objects and accepts the compiler's fake tensors.
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    for tensor in [*tensors, *(t.grad for t in tensors if t.is_leaf and t.grad is not None)]:
        if tensor.device.type == torch.device(device).type:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def more_in(run: Variant, device: str) -> int | None:
    """Bytes that a step allocates temporarily; None if the device is not a CUDA device."""
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
