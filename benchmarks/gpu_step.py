"""What does an O2 step cost on a GPU after the last backward pass, in time, host time, launches, waits and bytes?

    time      against GradScaler with float32 parameters, a loop by hand with masters, and the same rule as inductor
              compiles it; and as a share of a copy's bandwidth: 100 % if a step takes as long as a copy of 30 bytes a
              parameter, the least that unscale, check, clip, AdamW and write-back can move
    forms     compact formats of weights and moments, and layer-wise rules, against FusedAdamW with float32 masters;
              also as a share of a copy's bandwidth, from the bytes that each must move
    host      400 tensors of 1024, where launches dominate: time until the host is free again, kernels launched, and
              calls that wait for the device
    memory    bytes per parameter, held between steps and at the peak within a step
    compile   the first two steps of a new process, with an empty cache on disk and with a filled one

Needs a CUDA device, torch and triton.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from _harness import Sample, Variant, arguments, chosen, report, save, time_variants
from step import (
    BY_HAND,
    SCALE,
    Shape,
    by_hand,
    copy,
    gpt,
    hand_over,
    low_dtype,
    with_engine,
    with_grad_scaler,
)
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import halfpeak
from halfpeak.fused import FusedAdamW, FusedLAMB, FusedNovoGrad
from halfpeak.fused.base import FusedOptimizer

MANY: list[Shape] = [(1024,)] * 400
FEW: list[Shape] = gpt()
COPY = "a copy of 30 bytes a parameter"
NATIVE = "GradScaler, float32, AdamW(fused=True)"
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 1e-2
FORMS: dict[str, dict[str, Any]] = {
    "remainders": {"master": "remainder"},
    "remainders, bfloat16 moments": {"master": "remainder", "moments": torch.bfloat16},
    "8-bit remainders and moments": {"master": "remainder8", "moments": "int8"},
}
LAYERWISE: dict[str, Callable[..., FusedOptimizer]] = {
    "FusedLAMB": functools.partial(FusedLAMB, max_grad_norm=0.0),
    "FusedNovoGrad": FusedNovoGrad,
}
BYTES = {
    "halfpeak O2, FusedAdamW": 30.0,
    "halfpeak O2, FusedAdamW, remainders": 28.0,
    "halfpeak O2, FusedAdamW, remainders, bfloat16 moments": 20.0,
    "halfpeak O2, FusedAdamW, 8-bit remainders and moments": 14.125,
    # LAMB reads moments and weights again after it has computed their norms.
    "halfpeak O2, FusedLAMB": 42.0,
    "halfpeak O2, FusedNovoGrad": 22.0,
}
"""The bytes per parameter that a step must move; gradients are read twice."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def main() -> None:
    options = arguments(__doc__)
    for case, shapes in cases(options).items():
        samples = time_variants(
            variants(shapes, options.device), device=options.device, rounds=options.rounds
        )
        report("gpu_step", case, samples, baseline=NATIVE, options=options, of_copy=shares(samples))
        free(options.device)
    for measure in (forms, host, memory, first_steps):
        if options.device == "cpu" and measure is not forms:
            print(f"{measure.__name__}: needs a CUDA device")
        elif options.only in measure.__name__:
            measure(options)


def cases(options: argparse.Namespace) -> dict[str, list[Shape]]:
    """The parameters by case; the large ones take 120 GB, all variants together, or a quarter on a smaller card."""
    room = 0 if options.device == "cpu" else torch.cuda.mem_get_info()[1]
    layers, more = (24, 9) if room > 130e9 else (6, 2)
    large = gpt(layers=layers, width=1792) + [(4096, 1792)] * more
    named = {
        "400 tensors of 1024": MANY,
        "a transformer, 99 tensors, 23 M": FEW,
        f"a transformer, {len(large)} tensors, {sum(map(math.prod, large)) / 1e9:.2f} B": large,
    }
    return {name: named[name] for name in chosen(named, options)}


def variants(shapes: Sequence[Shape], device: str) -> dict[str, Variant]:
    fused = functools.partial(torch.optim.AdamW, fused=True)
    return {
        NATIVE: with_grad_scaler(shapes, device, fused),
        BY_HAND: by_hand(shapes, device, fused),
        "halfpeak O2, AdamW(fused=True)": with_engine(shapes, device, fused),
        "halfpeak O2, FusedAdamW": with_engine(shapes, device, FusedAdamW),
        "halfpeak O5, FusedAdamW": with_engine(shapes, device, FusedAdamW, "O5"),
        "by inductor, gradients packed": by_inductor(shapes, device),
        "by inductor, gradients in one vector": by_inductor([(sum(map(math.prod, shapes)),)], device),
        COPY: copy(shapes, device, parts=5),
    }


def by_inductor(shapes: Sequence[Shape], device: str) -> Variant:
    """What FusedAdamW does at O2, as three functions of vectors that ``torch.compile`` makes kernels of.

    The gradients of several tensors are first copied into one vector: 4 more bytes a parameter.
    """
    sizes = [math.prod(shape) for shape in shapes]
    total = sum(sizes)
    low = torch.randn(total, device=device, dtype=low_dtype(device))
    weight, first, second = low.float(), torch.zeros(total, device=device), torch.zeros(total, device=device)
    parameters = list(low.split(sizes))
    gradients = [torch.full_like(part, 0.01 * SCALE) for part in parameters]
    packed = torch.empty_like(low) if len(sizes) > 1 else gradients[0]
    places = packed.split(sizes)
    scale, number = torch.full((), SCALE, device=device), torch.zeros((), device=device)

    @torch.compile(fullgraph=True, dynamic=False)
    def measured(grad: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        wide = grad.float() / scale
        return wide.square().sum(), wide.isfinite().all()

    @torch.compile(fullgraph=True, dynamic=False)
    def decided(squares: Tensor, good: Tensor, scale: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        number += good
        factor = (1.0 / (squares.sqrt() + 1e-6)).clamp(max=1.0) / scale
        return factor, LR / (1 - BETA1**number), (1 - BETA2**number).rsqrt()

    @torch.compile(fullgraph=True, dynamic=False)
    def updated(
        low: Tensor,
        weight: Tensor,
        first: Tensor,
        second: Tensor,
        grad: Tensor,
        good: Tensor,
        *numbers: Tensor,
    ) -> None:
        factor, rate, root = numbers
        wide = grad.float() * factor
        mean = first + (wide - first) * (1 - BETA1)
        square = second * BETA2 + wide * wide * (1 - BETA2)
        new = weight * (1 - LR * DECAY) - rate * mean / (square.sqrt() * root + EPS)
        first.copy_(torch.where(good, mean, first))
        second.copy_(torch.where(good, square, second))
        new = torch.where(good, new, weight)
        weight.copy_(new)
        low.copy_(new)

    def run() -> None:
        hand_over(parameters, gradients)
        if len(sizes) > 1:
            torch._foreach_copy_(places, [part.grad for part in parameters if part.grad is not None])
        squares, good = measured(packed, scale)
        updated(low, weight, first, second, packed, good, *decided(squares, good, scale, number))

    return run


def forms(options: argparse.Namespace) -> None:
    """Measure compact formats and layer-wise rules."""
    for case, shapes in list(cases(options).items())[-1:]:
        device = options.device
        base = next(iter(BYTES))
        variants = {base: joined(split_engine(device, shapes))}
        for name, form in FORMS.items():
            variants[f"{base}, {name}"] = joined(split_engine(device, shapes, **form))
        for name, make in LAYERWISE.items():
            variants[f"halfpeak O2, {name}"] = joined(split_engine(device, shapes, make))
        variants[COPY] = copy(shapes, device, parts=5)
        samples = time_variants(variants, device=device, rounds=options.rounds)
        copied = statistics.median(sample.wall for sample in samples[COPY])
        speed = {
            name: round(bytes / 30.0 * copied / statistics.median(sample.wall for sample in samples[name]), 3)
            for name, bytes in BYTES.items()
        }
        report("gpu_forms", case, samples, baseline=base, options=options, of_copy=speed)
        del variants
        free(device)


def shares(samples: Mapping[str, Sequence[Sample]]) -> dict[str, object]:
    """The bandwidth at 30 bytes a parameter, as a share of the copy's bandwidth in the same round."""
    base = [sample.wall for sample in samples[COPY]]
    return {
        name: round(statistics.median(b / s.wall for b, s in zip(base, taken, strict=True)), 3)
        for name, taken in samples.items()
    }


class Split(NamedTuple):
    """A step in two parts, of which only the second is measured.

    Attributes:
        before: leaves gradients.
        step: the step.
    """

    before: Variant
    step: Variant


def host(options: argparse.Namespace) -> None:
    """Measure host time, launches and waits of the step alone."""
    device = options.device
    fused = functools.partial(torch.optim.AdamW, fused=True)
    runs = {
        NATIVE: whole(with_grad_scaler(MANY, device, fused)),
        BY_HAND: whole(by_hand(MANY, device, fused)),
        "halfpeak O2, AdamW(fused=True)": whole(with_engine(MANY, device, fused)),
        "halfpeak O2, FusedAdamW": split_engine(device),
        "halfpeak O2, FusedAdamW, 8-bit remainders and moments": split_engine(
            device, **FORMS["8-bit remainders and moments"]
        ),
        **{f"halfpeak O2, {name}": split_engine(device, make=make) for name, make in LAYERWISE.items()},
    }
    times: dict[str, list[Sample]] = {name: [] for name in runs}
    for turn in range(options.rounds + 3):
        for name, run in runs.items():
            sample = until_free(run, device)
            if turn >= 3:
                times[name].append(sample)
    counts = {name: calls(run) for name, run in runs.items()}
    report(
        "gpu_host",
        "400 tensors of 1024, until the host is free",
        times,
        baseline=NATIVE,
        options=options,
        kernels={name: count[0] for name, count in counts.items()},
        waits={name: count[1] for name, count in counts.items()},
    )
    for name, (kernels, waits) in counts.items():
        print(f"  {name:52} {kernels:>5} kernels {waits:>3} waits")


def whole(run: Variant) -> Split:
    return Split(lambda: None, run)


def split_engine(
    device: str,
    shapes: Sequence[Shape] = MANY,
    make: Callable[..., FusedOptimizer] = FusedAdamW,
    **form: Any,
) -> Split:
    low = torch.bfloat16 if form else low_dtype(device)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape, device=device)) for shape in shapes])
    optimizer = make(model.parameters(), **form)
    scale = halfpeak.ScaleConfig(init=2.0**10)
    engine = halfpeak.prepare(
        model, optimizer, halfpeak.LEVELS["O2"].replace(cast_model_type=low), clip=1.0, scale=scale
    )
    parameters = list(model)
    gradients = [torch.full_like(p, 0.01) for p in parameters]
    loss = torch.zeros((), device=device)

    def before() -> None:
        with engine.scaled(loss):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    return Split(before, engine.step)


def joined(split: Split) -> Variant:
    def run() -> None:
        split.before()
        split.step()

    return run


def until_free(run: Split, device: str) -> Sample:
    run.before()
    synchronise(device)
    wall, cpu = time.perf_counter(), time.process_time()
    run.step()
    sample = Sample(time.process_time() - cpu, time.perf_counter() - wall)
    synchronise(device)
    return sample


def calls(run: Split) -> tuple[int, int]:
    """The number of kernels of the step, and of its calls that wait for the device."""
    run.before()
    synchronise("cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run.step()
    events = found.events() or []
    kernels = [
        event.name
        for event in events
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset", "Optimizer."))
    ]
    names = [event.name for event in events]
    # One wait is the profiler's own, when it ends.
    closing = 1 if "cudaDeviceSynchronize" in names else 0
    return len(kernels), sum(map(names.count, WAITS)) - closing


def memory(options: argparse.Namespace) -> None:
    """Measure bytes per parameter after some steps and at the peak within a step, with gradients if they are kept."""
    shapes: list[Shape] = [(4096, 4096)] * 8
    total = 8 * 4096 * 4096
    fused, foreach = (functools.partial(torch.optim.AdamW, **{kind: True}) for kind in ("fused", "foreach"))
    makers: dict[str, Callable[[], Variant]] = {
        BY_HAND: lambda: by_hand(shapes, options.device, fused),
        "by hand, AdamW(foreach=True)": lambda: by_hand(shapes, options.device, foreach),
        NATIVE: lambda: with_grad_scaler(shapes, options.device, fused),
        "halfpeak O2, AdamW(fused=True)": lambda: with_engine(shapes, options.device, fused),
        "halfpeak O2, FusedAdamW": lambda: with_engine(shapes, options.device, FusedAdamW),
        **{
            f"halfpeak O2, FusedAdamW, {name}": lambda form=form: joined(
                split_engine(options.device, shapes, **form)
            )
            for name, form in FORMS.items()
        },
    }
    rows: list[dict[str, object]] = []
    print("\ngpu_memory: bytes per parameter, low gradients of 2 (float32: 4) included")
    for name, make in makers.items():
        free(options.device)
        start = torch.cuda.memory_allocated()
        run = make()
        for _ in range(3):
            run()
        synchronise(options.device)
        held = (torch.cuda.memory_allocated() - start) / total
        torch.cuda.reset_peak_memory_stats()
        run()
        peak = (torch.cuda.max_memory_allocated() - start) / total
        print(f"  {name:52} {held:8.3f} held {peak:8.3f} at the peak")
        rows.append(
            {"case": "134 M parameters", "variant": name, "held": round(held, 4), "peak": round(peak, 4)}
        )
        del run
    save("gpu_memory", rows, options)


def first_steps(options: argparse.Namespace) -> None:
    """Measure the seconds of a process's first two steps, with an empty cache on disk and with a filled one."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as cache:
        for case in ("nothing cached", "cached on disk"):
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            command = [sys.executable, __file__, "--first-steps"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            seconds = float(done.stdout.split()[-1])
            print(f"\ngpu_compile: {case}: {seconds:.2f} s")
            rows.append({"case": "O2 with FusedAdamW", "variant": case, "seconds": round(seconds, 3)})
    save("gpu_compile", rows, options)


def time_first_steps() -> None:
    """Print the seconds of the first two steps of this process."""
    torch.ones(1, device="cuda")
    run = split_engine("cuda")
    synchronise("cuda")
    start = time.perf_counter()
    for _ in range(2):
        run.before()
        run.step()
    synchronise("cuda")
    print(time.perf_counter() - start)


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def free(device: str) -> None:
    if device != "cpu":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    if sys.argv[1:] == ["--first-steps"]:
        time_first_steps()
    else:
        main()
