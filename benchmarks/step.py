"""What does one O2 step cost after the last backward pass: unscale, check, clip, AdamW, write back?

Against a loop written by hand with the same torch operations (fused and foreach AdamW), and against
``torch.amp.GradScaler`` with float32 parameters, which has no masters to write back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from _harness import Variant, arguments, report, time_variants
from torch import Tensor, nn

import halfpeak

SCALE = 2.0**16


def build(sizes: list[int], device: str) -> nn.ParameterList:
    generator = torch.Generator(device).manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(n, generator=generator, device=device)) for n in sizes])


def with_engine(sizes: list[int], device: str, low: torch.dtype, **adam: bool) -> Variant:
    model = build(sizes, device)
    optimizer = torch.optim.AdamW(model.parameters(), **adam)
    engine = halfpeak.prepare(
        model, optimizer, "O2", cast_model_type=low, clip=1.0, scale=halfpeak.ScaleConfig(init=SCALE)
    )
    parameters = list(model)
    gradients = [torch.full_like(p, 0.01 * SCALE) for p in parameters]
    loss = torch.zeros((), device=device)

    def run() -> None:
        with engine.scaled(loss, lanes=engine.lanes):
            _hand_over(parameters, gradients)
        engine.step()

    return run


def by_hand(sizes: list[int], device: str, low: torch.dtype, **adam: bool) -> Variant:
    parameters = list(build(sizes, device))
    masters = [p.detach().clone().requires_grad_() for p in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to(low)
    optimizer = torch.optim.AdamW(masters, **adam)
    gradients = [torch.full_like(p, 0.01 * SCALE) for p in parameters]
    inv_scale = torch.tensor(1 / SCALE, device=device)

    def run() -> None:
        _hand_over(parameters, gradients)
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        found_inf = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_([m.grad for m in masters], found_inf, inv_scale)
        nn.utils.clip_grad_norm_(masters, 1.0)
        if not found_inf.item():
            optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        _drop([*masters, *parameters])

    return run


def with_grad_scaler(sizes: list[int], device: str, low: torch.dtype, **adam: bool) -> Variant:
    parameters = list(build(sizes, device))
    optimizer = torch.optim.AdamW(parameters, **adam)
    scaler = torch.amp.GradScaler(device)
    scaler.scale(torch.zeros((), device=device))
    gradients = [torch.full_like(p, 0.01 * SCALE) for p in parameters]

    def run() -> None:
        _hand_over(parameters, [g.clone() for g in gradients])
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        _drop(parameters)

    return run


def _hand_over(parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _drop(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    low = torch.bfloat16 if options.device == "cpu" else torch.float16
    makers: dict[str, Callable[..., Variant]] = {
        "by hand": by_hand,
        "halfpeak": with_engine,
        "GradScaler, float32 parameters": with_grad_scaler,
    }
    for case, sizes in (
        ("400 tensors of 1024", [1024] * 400),
        ("100 tensors, 23 M parameters", [230_000] * 100),
    ):
        variants = {
            f"{name}, AdamW({kind}=True)": make(sizes, options.device, low, **{kind: True})
            for kind in ("fused", "foreach")
            for name, make in makers.items()
        }
        times = time_variants(variants, device=options.device, rounds=options.rounds)
        report("step", case, times, baseline="by hand, AdamW(fused=True)", options=options)


if __name__ == "__main__":
    main()
