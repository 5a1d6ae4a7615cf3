"""What does an O2 step cost after the last backward pass: unscale, check, clip, AdamW, write back?

halfpeak's steps go through the engine, as in training: scaled loss, gradients, ``engine.step()``. They are compared
with a loop by hand with masters and torch's operations, and with ``torch.amp.GradScaler`` and float32 parameters, which
has no masters to write back. The variant with two tensors shows what the number of tensors costs: checking each tensor
and packing gradients. The copy of 30 bytes a parameter moves as many bytes as a step must.

The last case is a plain float32 step without scale, check and clipping, for comparison with other optimizers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from _harness import Variant, arguments, chosen, report, time_variants
from _rivals import optimizers
from torch import Tensor, nn

import halfpeak
from halfpeak.fused import FusedAdamW

SCALE = 2.0**16
Shape = tuple[int, ...]
Optimizers = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def gpt(layers: int = 8, width: int = 448) -> list[Shape]:
    """The shapes of a transformer's parameters."""
    wide = 4 * width
    block = [
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        (wide, width),
        (wide,),
        (width, wide),
    ]
    return [(8000, width), *(block + [(width,)] * 5) * layers, (width,), (width,)]


CASES: dict[str, list[Shape]] = {
    "400 tensors of 1024": [(1024,)] * 400,
    "a transformer, 99 tensors, 23 M": gpt(),
    "400 tensors, 26 M": [(512, 256), (512,), (256, 512), (256,)] * 100,
}
PLAIN = "float32 alone: a transformer, 99 tensors, 23 M"
BY_HAND = "by hand, AdamW(fused=True)"


def main() -> None:
    options = arguments(__doc__)
    device = options.device
    fused, foreach = (functools.partial(torch.optim.AdamW, **{kind: True}) for kind in ("fused", "foreach"))
    backends = ("compiled", "eager") if device == "cpu" else ("auto",)
    for case in chosen(CASES, options):
        shapes = CASES[case]
        variants = {
            BY_HAND: by_hand(shapes, device, fused),
            "by hand, AdamW(foreach=True)": by_hand(shapes, device, foreach),
            "GradScaler, float32, AdamW(fused=True)": with_grad_scaler(shapes, device, fused),
            "GradScaler, float32, AdamW(foreach=True)": with_grad_scaler(shapes, device, foreach),
            "halfpeak O2, AdamW(fused=True)": with_engine(shapes, device, fused),
            **{
                f"halfpeak O2, FusedAdamW, {backend} backend": with_engine(
                    shapes, device, functools.partial(FusedAdamW, backend=backend)
                )
                for backend in backends
            },
            "halfpeak O2, FusedAdamW, all in two tensors": with_engine(
                [(sum(map(math.prod, shapes)),), (16,)],
                device,
                functools.partial(FusedAdamW, backend=backends[0]),
            ),
            "a copy of 30 bytes a parameter": copy(shapes, device),
        }
        samples = time_variants(variants, device=device, rounds=options.rounds)
        report("step", case, samples, baseline=BY_HAND, options=options)
        del variants
    for case in chosen([PLAIN], options):
        shapes = gpt()
        variants = {
            "AdamW(fused=True)": plain(shapes, device, fused),
            "AdamW(foreach=True)": plain(shapes, device, foreach),
            **{
                f"FusedAdamW, {backend} backend": plain(
                    shapes, device, functools.partial(FusedAdamW, backend=backend)
                )
                for backend in backends
            },
        }
        variants |= {name: plain(shapes, device, rival) for name, rival in optimizers(device).items()}
        samples = time_variants(variants, device=device, rounds=options.rounds)
        report("step", case, samples, baseline="AdamW(fused=True)", options=options)


def build(shapes: Sequence[Shape], device: str) -> nn.ParameterList:
    generator = torch.Generator(device).manual_seed(0)
    tensors = [torch.randn(shape, generator=generator, device=device) * 0.02 for shape in shapes]
    return nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])


def low_dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cpu" else torch.float16


def with_engine(shapes: Sequence[Shape], device: str, make: Optimizers, name: str = "O2") -> Variant:
    model, level = build(shapes, device), halfpeak.LEVELS[name]
    has_scale = name == "O2"
    engine = halfpeak.prepare(
        model,
        make(list(model.parameters())),
        level.replace(cast_model_type=low_dtype(device)) if has_scale else level,
        clip=1.0,
        scale=halfpeak.ScaleConfig(init=SCALE) if has_scale else None,
    )
    parameters = list(model)
    gradients = [torch.full_like(p, 0.01 * SCALE if has_scale else 0.01) for p in parameters]
    loss = torch.zeros((), device=device)

    def run() -> None:
        with engine.scaled(loss):
            hand_over(parameters, gradients)
        engine.step()

    return run


def by_hand(shapes: Sequence[Shape], device: str, make: Optimizers) -> Variant:
    """A good loop by hand: it keeps the memory of the masters' gradients, 4 bytes a parameter that FusedAdamW saves."""
    parameters = list(build(shapes, device))
    masters = [p.detach().clone().requires_grad_() for p in parameters]
    for master, parameter in zip(masters, parameters, strict=True):
        parameter.data = parameter.data.to(low_dtype(device))
        master.grad = torch.empty_like(master)
    wide = [master.grad for master in masters if master.grad is not None]
    optimizer = make(masters)
    gradients = [torch.full_like(p, 0.01 * SCALE) for p in parameters]
    scale = torch.full((), SCALE, device=device)
    clean = torch.zeros((), dtype=torch.int32, device=device)

    def run() -> None:
        hand_over(parameters, gradients)
        torch._foreach_copy_(wide, [p.grad for p in parameters if p.grad is not None])
        found_inf = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(wide, found_inf, scale.double().reciprocal().float())
        nn.utils.clip_grad_norm_(masters, 1.0)
        if not found_inf.item():
            optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        torch._amp_update_scale_(scale, clean, found_inf, 2.0, 0.5, 2000)
        for parameter in parameters:
            parameter.grad = None

    return run


def with_grad_scaler(shapes: Sequence[Shape], device: str, make: Optimizers) -> Variant:
    parameters = list(build(shapes, device))
    optimizer = make(parameters)
    # A scale of 1 costs as much as any other, and does not change the gradients, which the next repetition reuses.
    scaler = torch.amp.GradScaler(device, init_scale=1.0, growth_interval=10**6)
    scaler.scale(torch.zeros((), device=device))
    gradients = [torch.full_like(p, 0.01) for p in parameters]

    def run() -> None:
        hand_over(parameters, gradients)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        for parameter in parameters:
            parameter.grad = None

    return run


def copy(shapes: Sequence[Shape], device: str, parts: int = 1) -> Variant:
    # Half of the bytes are read and half are written.
    length = 15 // parts * sum(map(math.prod, shapes))
    source, target = (torch.ones(length, dtype=torch.int8, device=device) for _ in range(2))

    def run() -> None:
        for _ in range(parts):
            target.copy_(source)

    return run


def plain(shapes: Sequence[Shape], device: str, make: Optimizers) -> Variant:
    parameters = list(build(shapes, device))
    hand_over(parameters, [torch.full_like(p, 0.01) for p in parameters])
    return make(parameters).step


def hand_over(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


if __name__ == "__main__":
    main()
