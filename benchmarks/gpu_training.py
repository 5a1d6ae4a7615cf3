"""What does a whole training step cost on a GPU: forward, loss, backward, unscale, clip, step?

GPT-2 with 124 M parameters, batches of 8 times 1024 words: float32 with and without TF32, torch's own mixed precision
(autocast, GradScaler, clip_grad_norm_, AdamW(fused=True)), halfpeak's levels, and a float16 model without loss scale,
check and clipping ("O3 by hand"), a lower bound for O2. Also forty layers of 64, where a step costs only launches.

Needs a CUDA device, torch and triton.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from _harness import Variant, arguments, chosen, report, time_variants
from _nets import Block, deep
from torch import Tensor, nn
from torch.nn import functional as F

import halfpeak
from halfpeak.fused import FusedAdamW

NATIVE = "native: autocast, GradScaler, clip, AdamW(fused=True)"
LR = 1e-4


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


class Job:
    """A network, its batch and its loss, the same in every variant."""

    def __init__(self, build: Callable[[], nn.Module], x: Tensor, y: Tensor) -> None:
        self._build, self.x, self.y = build, x, y

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self._build().to(self.x.device)

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


def small(device: str) -> Job:
    x, y = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0)).to(device)
    return Job(deep, x, y)


JOBS: dict[str, Callable[[str], Job]] = {
    "40 layers of 64, bound by launching": small,
    "GPT-2 124 M, 8 x 1024": gpt2,
}


def main() -> None:
    options = arguments(__doc__)
    for case in chosen(JOBS, options):
        job = JOBS[case](options.device)
        variants: dict[str, Variant] = {
            NATIVE: native(job),
            "float32": plain(job, tf32=False),
            "float32 with TF32": plain(job, tf32=True),
            "O3 by hand, AdamW(fused=True)": by_hand_o3(job),
            "halfpeak O1, FusedAdamW": with_engine(job, "O1"),
            "halfpeak O2, FusedAdamW": with_engine(job, "O2"),
            "halfpeak O2, AdamW(fused=True)": with_engine(job, "O2", fused=False),
            "halfpeak O5, FusedAdamW": with_engine(job, "O5"),
        }
        if options.device != "cpu":
            variants["halfpeak O2, FusedAdamW, captured"] = captured(job, "O2")
        samples = time_variants(variants, device=options.device, rounds=options.rounds)
        report("gpu_training", case, samples, baseline=NATIVE, options=options)
        del variants
        torch.cuda.empty_cache()


def native(job: Job) -> Variant:
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    scaler = torch.amp.GradScaler(job.x.device.type)

    def run() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(job.x.device.type, torch.float16):
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


def by_hand_o3(job: Job) -> Variant:
    model = job.model().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-4, fused=True)
    x = job.x.half() if job.x.is_floating_point() else job.x

    def run() -> Tensor:
        optimizer.zero_grad()
        loss = job.loss(model(x), job.y)
        loss.backward()
        optimizer.step()
        return loss

    return run


def prepared(job: Job, level: str, *, fused: bool = True) -> tuple[nn.Module, halfpeak.Engine]:
    model = job.model()
    parameters = list(model.parameters())
    optimizer = FusedAdamW(parameters, lr=LR) if fused else torch.optim.AdamW(parameters, lr=LR, fused=True)
    return model, halfpeak.prepare(model, optimizer, level, clip=1.0)


def with_engine(job: Job, level: str, *, fused: bool = True) -> Variant:
    model, engine = prepared(job, level, fused=fused)

    def run() -> Tensor:
        with engine.forward():
            loss = job.loss(model(job.x), job.y)
        engine.backward(loss)
        engine.step()
        return loss

    return run


def captured(job: Job, level: str) -> Variant:
    model, engine = prepared(job, level)
    step = engine.capture(lambda x, y: job.loss(model(x), y), job.x, job.y)
    return lambda: step(job.x, job.y)


if __name__ == "__main__":
    main()
