"""What does a whole training step cost on a GPU: forward, loss, backward, unscale, clip, step?

GPT-2 with 124 M parameters, batches of 8 times 1024 words; a residual network on 256 images of 64 times 64; forty layers
of 64, where a step costs only launches. In float16 and in bfloat16, eager and compiled by ``torch.compile``:
torch's own mixed precision (autocast, in float16 GradScaler, clip_grad_norm_, AdamW(fused=True)) and halfpeak's levels.
Beside them float32 with and without TF32, a step captured as a CUDA graph, and a low-precision model without loss scale,
check and clipping ("O3 by hand"), a lower bound for O2 and O5.

Needs a CUDA device, torch and triton.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from _harness import Variant, arguments, chosen, report, time_variants
from _nets import Block, Residual, deep
from torch import Tensor, nn
from torch.nn import functional as F

import halfpeak
from halfpeak.fused import FusedAdamW

NATIVE = "native: autocast, scaler, clip, AdamW(fused=True)"
LR = 1e-4
LEVELS = {torch.float16: ("O1", "O2"), torch.bfloat16: ("O4", "O5")}


class GPT2(nn.Module):
    """GPT-2 with 124 M parameters; the head shares the weight of the embedding."""

    def __init__(self, width: int = 768, layers: int = 12, words: int = 50304, length: int = 1024) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(self.words(x) + places)))


def residual() -> nn.Module:
    """A residual network with 11 M parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    for width in (64, 128, 256, 512):
        layers += [nn.Conv2d(width // 2, width, 3, stride=2, padding=1, bias=False)] if width > 64 else []
        layers += [Residual(width), Residual(width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Job:
    """A network, its batch and its loss, the same in every variant."""

    def __init__(self, build: Callable[[], nn.Module], x: Tensor, y: Tensor) -> None:
        self._build, self.x, self.y = build, x, y

    def model(self, *, compiled: bool = False) -> nn.Module:
        """A new network with the same weights, on request compiled."""
        torch.manual_seed(0)
        with torch.device(self.x.device):
            model = self._build()
        if self.x.dim() == 4:
            model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] # a documented overload
        # With fixed shapes: those of a later variant, with another dtype, would be compiled to be general.
        whole: Any = torch.compile(model, dynamic=False) if compiled else model
        return whole

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        wide = output.float()
        return (
            F.mse_loss(wide, y)
            if y.is_floating_point()
            else F.cross_entropy(wide.flatten(0, -2), y.flatten())
        )


def gpt2(device: str) -> Job:
    words = torch.randint(50257, (8, 1025), generator=torch.Generator().manual_seed(0)).to(device)
    return Job(GPT2, words[:, :-1].contiguous(), words[:, 1:].contiguous())


def images(device: str) -> Job:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 3, 64, 64, generator=generator), torch.randint(10, (256,), generator=generator)
    return Job(residual, x.to(device, memory_format=torch.channels_last), y.to(device))


def small(device: str) -> Job:
    x, y = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0)).to(device)
    return Job(deep, x, y)


JOBS: dict[str, Callable[[str], Job]] = {
    "40 layers of 64": small,
    "GPT-2 124 M, 8 x 1024": gpt2,
    "residual network, 256 x 64 x 64": images,
}


def main() -> None:
    options = arguments(__doc__)
    for case in chosen(JOBS, options):
        job = JOBS[case](options.device)
        for low in LEVELS:
            for compiled in (False, True):
                samples = time_variants(
                    variants(job, low, compiled=compiled), device=options.device, rounds=options.rounds
                )
                name = f"{case}, {str(low).removeprefix('torch.')}{', compiled' if compiled else ''}"
                report("gpu_training", name, samples, baseline=NATIVE, options=options)
                # Later variants have other dtypes, for which one function is compiled 8 times at most.
                torch.compiler.reset()
                if options.device != "cpu":
                    torch.cuda.empty_cache()


def variants(job: Job, low: torch.dtype, *, compiled: bool) -> dict[str, Variant]:
    per_op, half = LEVELS[low]
    found: dict[str, Variant] = {
        NATIVE: native(job, low, compiled=compiled),
        f"halfpeak {per_op}, FusedAdamW": with_engine(job, per_op, compiled=compiled),
        f"halfpeak {half}, FusedAdamW": with_engine(job, half, compiled=compiled),
    }
    if compiled:
        return found
    found[f"halfpeak {half}, AdamW(fused=True)"] = with_engine(job, half, fused=False)
    if job.x.device.type == "cuda":
        found[f"halfpeak {half}, FusedAdamW, captured"] = captured(job, half)
    found["O3 by hand, AdamW(fused=True)"] = by_hand_o3(job, low)
    if low is torch.float16:
        found |= {"float32": plain(job, tf32=False), "float32 with TF32": plain(job, tf32=True)}
    return found


def native(job: Job, low: torch.dtype, *, compiled: bool) -> Variant:
    model = job.model(compiled=compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    scaler = torch.amp.GradScaler(job.x.device.type, enabled=low is torch.float16)

    def run() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(job.x.device.type, low):
            loss = job.loss(model(job.x), job.y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return run


def plain(job: Job, *, tf32: bool) -> Variant:
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def run() -> Tensor:
        optimizer.zero_grad()
        with multiplying("high" if tf32 else "highest"):
            loss = job.loss(model(job.x), job.y)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return run


@contextmanager
def multiplying(precision: str) -> Generator[None]:
    """Compute float32 matrix products at a precision inside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def by_hand_o3(job: Job, low: torch.dtype) -> Variant:
    model = job.model().to(low)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-4, fused=True)
    x = job.x.to(low) if job.x.is_floating_point() else job.x

    def run() -> Tensor:
        optimizer.zero_grad()
        loss = job.loss(model(x), job.y)
        loss.backward()
        optimizer.step()
        return loss

    return run


def prepared(
    job: Job, level: str, *, compiled: bool = False, fused: bool = True
) -> tuple[nn.Module, halfpeak.Engine]:
    model = job.model(compiled=compiled)
    parameters = list(model.parameters())
    optimizer = FusedAdamW(parameters, lr=LR) if fused else torch.optim.AdamW(parameters, lr=LR, fused=True)
    return model, halfpeak.prepare(model, optimizer, halfpeak.LEVELS[level], clip=1.0)


def with_engine(job: Job, level: str, *, compiled: bool = False, fused: bool = True) -> Variant:
    model, engine = prepared(job, level, compiled=compiled, fused=fused)

    def run() -> Tensor:
        with engine.forward():
            loss = job.loss(model(job.x), job.y)
        engine.backward(loss)
        engine.step()
        return loss

    return run


def captured(job: Job, level: str) -> Variant:
    model, engine = prepared(job, level)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return job.loss(model(x), y)

    step = engine.capture(loss, job.x, job.y)
    return lambda: step(job.x, job.y)


if __name__ == "__main__":
    main()
