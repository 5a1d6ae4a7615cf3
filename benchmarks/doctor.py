"""Do full runs confirm the level that halfpeak.doctor recommends?

Each task has the doctor's short runs, then full runs: float32 from three or five seeds, every other level from seed 0.
A level is confirmed if its metric on held-out data is at most 1 % above that of the worst float32 run. The doctor is
right if its level is confirmed and no confirmed level takes less than 90 % of its time per step.

    python benchmarks/doctor.py [--only NAME] [--steps 50]
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import halfpeak
from halfpeak.recipes.base import score
from halfpeak.recipes.catalog import build_config, build_recipe, complete

CPU = torch.device("cpu")
SEEDS = range(5)
Losses = Sequence[Callable[[Any, Any], Tensor]]


@dataclass(frozen=True)
class Task:
    """A training task, and its ``metric`` on held-out data, of which less is better."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], Any]
    batch: Callable[[int], Any]
    losses: Losses
    metric: Callable[[nn.Module], Tensor]
    steps: int = 400
    seeds: Sequence[int] = field(default_factory=lambda: SEEDS)


def adam(lr: float, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.optim.Adam(model.parameters(), lr=lr, **options)


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def recipe(name: str, steps: int, seeds: Sequence[int], **settings: Any) -> Task:
    config = build_config({"recipe": name, "steps": steps, "level": "O0", **settings})
    built = build_recipe(config, CPU)
    config, sampler = complete(config, built)

    def metric(model: nn.Module) -> Tensor:
        batch = next(iter(built.validation()))
        return score(model(batch.inputs), batch.targets).loss.float()

    return Task(
        built.model,
        lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
        lambda step: built.batch(sampler.indices(step)),
        [lambda model, batch: score(model(batch.inputs), batch.targets).loss],
        metric,
        steps,
        seeds,
    )


def regression(
    make: Callable[[], nn.Module],
    target: Callable[[Tensor], Tensor],
    *,
    factor: float = 1.0,
    size: float = 1.0,
    make_optimizer: Callable[[nn.Module], Any] | None = None,
    steps: int = 400,
) -> Task:
    """A regression on normally distributed inputs; ``factor`` multiplies the loss, ``size`` the targets."""

    def error(model: nn.Module, x: Tensor) -> Tensor:
        return functional.mse_loss(model(x).float(), size * target(x))

    return Task(
        make,
        make_optimizer or adam(2e-3),
        lambda step: drawn(step, 32, 16),
        [lambda model, x: factor * error(model, x)],
        lambda model: error(model, drawn(10**6, 512, 16)),
        steps,
    )


class Sequences(nn.Module):
    """An LSTM with a head on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attends(nn.Module):
    """A transformer layer that finds the longest of eight vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 1)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)))[..., 0]


class Huge(nn.Module):
    """A network with a layer whose outputs are beyond the range of float16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        with torch.no_grad():
            self.wide.weight.mul_(1e5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wide(self.first(x).relu()) * 1e-4)


class Gan(nn.Module):
    """A generator of points on a ring, and its critic."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = mlp(8, 64, 2), mlp(2, 64, 1)

    def forward(self, noise: Tensor) -> Tensor:
        return self.maker(noise)


def gan() -> Task:
    def real(seed: int, count: int = 64) -> Tensor:
        points = drawn(seed + 10**5, count, 2)
        return points / points.norm(dim=1, keepdim=True)

    def critic_loss(model: Any, seed: int) -> Tensor:
        fake = model.critic(model.maker(drawn(seed, 64, 8).to(_dtype(model))).detach())
        true = model.critic(real(seed).to(_dtype(model)))
        return functional.softplus(fake.float()).mean() + functional.softplus(-true.float()).mean()

    def maker_loss(model: Any, seed: int) -> Tensor:
        return functional.softplus(
            -model.critic(model.maker(drawn(seed, 64, 8).to(_dtype(model)))).float()
        ).mean()

    def metric(model: nn.Module) -> Tensor:
        return (model(drawn(10**6, 1024, 8).to(_dtype(model))).float().norm(dim=1) - 1).abs().mean()

    def two(model: Any) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.99))
            for part in (model.critic, model.maker)
        ]

    return Task(
        Gan,
        two,
        lambda step: step,
        [critic_loss, maker_loss],
        metric,
    )


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def classes(make: Callable[[], nn.Module], batch: Callable[[int, int], tuple[Tensor, Tensor]]) -> Task:
    def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(given[0]).float(), given[1])

    return Task(
        make, adam(2e-3), lambda step: batch(step, 32), [loss], lambda model: loss(model, batch(10**6, 512))
    )


def longest(seed: int, count: int) -> tuple[Tensor, Tensor]:
    x = drawn(seed, count, 8, 8)
    return x, x.norm(dim=-1).argmax(-1)


def sums(seed: int, count: int) -> Tensor:
    return drawn(seed, count, 12, 4)


def lstm() -> Task:
    def error(model: nn.Module, x: Tensor) -> Tensor:
        return functional.mse_loss(model(x).float(), x.sum((1, 2))[:, None] / 7)

    return Task(
        Sequences,
        adam(3e-3),
        lambda step: sums(step, 32),
        [error],
        lambda model: error(model, sums(10**6, 512)),
    )


TASKS: dict[str, Callable[[], Task]] = {
    "LSTM": lstm,
    "GAN": gan,
    "huge activations": lambda: regression(Huge, lambda x: x[:, :1].sin(), make_optimizer=adam(1e-3)),
    "tiny gradients": lambda: regression(lambda: mlp(16, 64, 1), lambda x: x[:, :1].sin(), factor=1e-7),
    "targets of 1e4": lambda: regression(
        lambda: mlp(16, 64, 1), lambda x: x[:, :1], size=1e4, make_optimizer=adam(0.3)
    ),
    "transformer layer": lambda: classes(Attends, longest),
    "fine-tuning at 1e-5": lambda: regression(
        lambda: mlp(16, 256, 1), lambda x: x[:, :1].sin(), make_optimizer=adam(1e-5, eps=1e-4)
    ),
    "wide layers": lambda: regression(
        lambda: mlp(16, 1024, 1024, 1), lambda x: x[:, :1].sin(), make_optimizer=adam(3e-4), steps=120
    ),
    "digits: residual network": lambda: recipe("digits", 80, range(3), batch=32),
    "pysource: a GPT": lambda: recipe("pysource", 80, range(3), size="tiny", context=32, batch=4),
}


def train(task: Task, level: Any, seed: int, keep_fp32: Sequence[str] = ()) -> tuple[float, float]:
    """The metric after a full run, and the seconds of a step."""
    torch.manual_seed(seed)
    model = task.make_model()
    made = task.make_optimizer(model)
    optimizers = made if isinstance(made, list) else [made]
    engine = halfpeak.prepare(
        model, optimizers, level, num_losses=len(optimizers), keep_fp32=keep_fp32, on_skip=None
    )
    seconds: list[float] = []
    try:
        for step in range(task.steps):
            batch = task.batch(step + 1000 * seed)
            began = time.process_time()
            for number, (loss, optimizer) in enumerate(zip(task.losses, optimizers, strict=True)):
                with engine.forward():
                    value = loss(model, batch)
                engine.backward(value, loss_id=number, optimizers=optimizer)
                engine.step(optimizers=optimizer)
            seconds.append(time.process_time() - began)
    except halfpeak.LossScaleCollapse:
        return float("nan"), float("nan")
    model.eval()
    with torch.no_grad(), engine.forward():
        return float(task.metric(model)), min(seconds)


def judge(name: str, task: Task, steps: int) -> list[str]:
    """A row of the table."""
    found = halfpeak.doctor(
        task.make_model,
        task.make_optimizer,
        [task.batch(step) for step in range(steps)],
        task.losses,
        steps=steps,
    )
    plain = [train(task, "O0", seed) for seed in task.seeds]
    worst, best = max(metric for metric, _ in plain), min(metric for metric, _ in plain)
    full = {"O0": (plain[0][0], min(seconds for _, seconds in plain))}
    for probe in found.probes:
        if probe.level != "O0":
            full[probe.level] = train(task, probe.level, 0, probe.keep_fp32)
    confirmed = {level: seconds for level, (metric, seconds) in full.items() if metric <= 1.01 * worst}
    fastest = min(confirmed, key=lambda level: confirmed[level])
    right = found.level in confirmed and confirmed[fastest] >= 0.9 * confirmed[found.level]
    said = [f"{p.level} ({p.against})" for p in found.probes if p.against]
    kept = [f"{p.level}: {', '.join(p.keep_fp32)}" for p in found.probes if p.keep_fp32]
    cells = [
        f"{level} {metric:.3g}{'' if level in confirmed else ' (no)'}, {1e3 * seconds:.2f} ms"
        for level, (metric, seconds) in full.items()
    ]
    return [
        name,
        found.level,
        f"{best:.3g} to {worst:.3g}",
        "; ".join(cells),
        "; ".join(said) or "-",
        "; ".join(kept) or "-",
        "yes" if right else f"NO: {fastest}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--steps", type=int, default=50, help="of the doctor's runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(
        "| task | the doctor says | float32, by seed | full runs: metric, time per step | against | in float32 | right |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, make in TASKS.items():
        if options.only in name:
            print(f"| {' | '.join(judge(name, make(), options.steps))} |", flush=True)


if __name__ == "__main__":
    main()
